// The scheduler of simt.h, and the functions by which tests steer it.
#include "simt.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "fiber.h"
#include "simt_mma.h"

namespace simt {
namespace {

constexpr unsigned kWarp = 32;

enum class State { ready, at_barrier, at_exchange, done };

struct Block;

struct Copy {  // begun, of the group that is open or of one before
  void* target;
  const void* source;
  int bytes, group;
};

struct Fiber {
  Context context;
  char* stack = nullptr;
  Block* block = nullptr;
  Dim thread;
  unsigned index = 0;
  State state = State::ready;
  unsigned mask = 0;            // of the exchange that it waits in
  uint64_t values[2] = {0, 0};  // exchanges take turns: a lane may be one ahead of another
  int turn = 0;
  void (*work)(void* const*) = nullptr;  // of the warp's instruction that it waits in
  std::vector<Copy> copies;
  int group = 0;  // of copies: the open one
};

struct Block {
  Dim position;
  std::vector<Fiber> fibers;
  std::unique_ptr<char[]> memory;
  unsigned at_barrier = 0, done = 0;
  bool votes = false, voted = false;  // at the barrier to come, and at the last one
};

struct {
  uint64_t seed = 1;
  int multiprocessors = 2, resident = 2;
  long launches = 0;
} settings;

Fiber* running = nullptr;
Context scheduler;
const std::function<void()>* work = nullptr;
std::vector<Fiber*> ready, late;  // late ones go on only where no other can
unsigned laggard = 0;             // the warp of every block that is late; beyond all: none
std::vector<char*> stacks;
std::mt19937_64 die;
std::string error;
bool stopped = false;

#ifdef __SANITIZE_ADDRESS__
const void* scheduler_stack = nullptr;
size_t scheduler_size = 0;
#endif

void enlist(Fiber* fiber) { (fiber->index / kWarp == laggard ? late : ready).push_back(fiber); }

void switch_to_scheduler(bool ends) {
  [[maybe_unused]] Fiber* me = running;
#ifdef __SANITIZE_ADDRESS__
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(ends ? nullptr : &fake, scheduler_stack, scheduler_size);
  leave_for(me->context, scheduler);
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
  (void)ends;
  leave_for(me->context, scheduler);
#endif
}

void switch_to(Fiber* fiber) {
  running = fiber;
  thread = fiber->thread;
  block = fiber->block->position;
#ifdef __SANITIZE_ADDRESS__
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, fiber->stack, kStack);
  leave_for(scheduler, fiber->context);
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
  leave_for(scheduler, fiber->context);
#endif
  running = nullptr;
}

void entry() {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_size);
#endif
  (*work)();
  if (!running->copies.empty()) stop("a copy that its thread has not waited for");
  running->state = State::done;
  ++running->block->done;
  switch_to_scheduler(true);
}

char* a_stack() {
  if (stacks.empty()) return new_stack();
  char* stack = stacks.back();
  stacks.pop_back();
  return stack;
}

void prepare(Fiber& fiber, Block& block, unsigned index) {
  fiber.block = &block;
  fiber.index = index;
  fiber.thread = Dim(index, 0, 0);
  fiber.stack = a_stack();
  begin_at(fiber.context, fiber.stack, entry);
  enlist(&fiber);
}

std::unique_ptr<Block> begin(unsigned number, size_t shared_bytes) {
  auto block = std::make_unique<Block>();
  block->position = Dim(number, 0, 0);
  block->memory.reset(new char[std::max<size_t>(shared_bytes, 1)]);
  std::memset(block->memory.get(), 0xff, shared_bytes);
  block->fibers.resize(block_size.x);
  for (unsigned i = 0; i < block_size.x; ++i) prepare(block->fibers[i], *block, i);
  return block;
}

void wake(Fiber& fiber) {
  fiber.state = State::ready;
  enlist(&fiber);
}

// What stops the threads of a block, where none can go on.
std::string standstill(const Block& block) {
  unsigned exchanging = 0;
  for (const Fiber& fiber : block.fibers) exchanging += fiber.state == State::at_exchange;
  return "block " + std::to_string(block.position.x) +
         " stands still: " + std::to_string(block.at_barrier) + " threads wait at a barrier, " +
         std::to_string(exchanging) + " in an instruction of their warp, " +
         std::to_string(block.done) + " have ended";
}

}  // namespace

void* shared() { return running->block->memory.get(); }
int multiprocessors() { return settings.multiprocessors; }

void let_others() {
  enlist(running);
  if (!ready.empty()) std::swap(ready.back(), ready[die() % ready.size()]);
  switch_to_scheduler(false);
}

bool barrier(bool vote) {
  Block& mine = *running->block;
  running->state = State::at_barrier;
  mine.votes = mine.votes || vote;
  if (++mine.at_barrier == mine.fibers.size()) {  // a thread that has ended never comes: an error
    mine.at_barrier = 0;
    mine.voted = mine.votes;
    mine.votes = false;
    for (Fiber& fiber : mine.fibers) wake(fiber);
  }
  switch_to_scheduler(false);
  return mine.voted;
}

namespace {

// Waits until the lanes in mask have come with the same instruction; the last one does its work.
void meet_warp(unsigned mask, uint64_t value, void (*instruction)(void* const*)) {
  Fiber& me = *running;
  Block& mine = *me.block;
  const unsigned first = me.index / kWarp * kWarp;
  me.values[me.turn] = value;
  me.turn ^= 1;
  me.mask = mask;
  me.work = instruction;
  me.state = State::at_exchange;
  bool all = true;
  for (unsigned i = 0; all && i < kWarp; ++i) {
    if (!(mask >> i & 1)) continue;
    all = first + i < mine.fibers.size();
    if (!all) break;
    const Fiber& other = mine.fibers[first + i];
    all = other.state == State::at_exchange && other.mask == mask && other.turn == me.turn &&
          other.work == instruction;
  }
  if (all && instruction != nullptr) {
    void* lanes[kWarp];
    for (unsigned i = 0; i < kWarp; ++i)
      lanes[i] = reinterpret_cast<void*>(mine.fibers[first + i].values[me.turn ^ 1]);
    instruction(lanes);
  }
  if (all)
    for (unsigned i = 0; i < kWarp; ++i)
      if (mask >> i & 1) wake(mine.fibers[first + i]);
  switch_to_scheduler(false);
}

}  // namespace

void together(void (*instruction)(void* const*), void* mine) {
  meet_warp(~0u, reinterpret_cast<uint64_t>(mine), instruction);
}

void stop(const char* what) {
  error = what;
  stopped = true;
  switch_to_scheduler(false);
  std::abort();  // nobody goes on
}

void copy_16(void* target, const void* source, int bytes) {
  if (bytes < 0 || bytes > 16 || reinterpret_cast<uintptr_t>(target) % 16 != 0 ||
      (bytes > 0 && reinterpret_cast<uintptr_t>(source) % 16 != 0))
    stop("a copy of more than 16 bytes, or that is not aligned");
  std::memset(target, 0xff, 16);
  running->copies.push_back({target, source, bytes, running->group});
}

void copy_commit() { ++running->group; }

void copy_wait(int pending) {
  std::erase_if(running->copies, [&](const Copy& copy) {
    if (copy.group >= running->group - pending) return false;
    std::memset(copy.target, 0, 16);
    std::memcpy(copy.target, copy.source, static_cast<size_t>(copy.bytes));
    return true;
  });
}

uint64_t exchange(unsigned mask, uint64_t value, unsigned lane) {
  const unsigned first = running->index / kWarp * kWarp;
  const int turn = running->turn;
  Block& mine = *running->block;
  meet_warp(mask, value, nullptr);
  if (lane >= kWarp || !(mask >> lane & 1)) return ~uint64_t{0};  // undefined on a GPU, NaN here
  return mine.fibers[first + lane].values[turn];
}

const char* launch(Dim blocks, Dim block_threads, size_t shared_bytes, size_t allowed,
                   const std::function<void()>& body) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  error.clear();
  stopped = false;
  if (blocks.x < 1 || block_threads.x < 1 || block_threads.x > 1024 || shared_bytes > allowed)
    return "a launch beyond CUDA's limits";
  ++settings.launches;
  grid_size = blocks;
  block_size = block_threads;
  work = &body;
  die.seed(settings.seed);
  ready.clear();
  late.clear();
  // Of three seeds one rolls the die for every step; one lets what was woken last go on, mostly, so
  // that a warp gets far ahead; one lets a warp of every block fall behind as far as it can.
  const bool ahead = settings.seed % 3 == 1;
  const unsigned warps = (block_threads.x + kWarp - 1) / kWarp;
  laggard = settings.seed % 3 == 2 ? static_cast<unsigned>(die() % warps) : ~0u;
  std::vector<unsigned> order(blocks.x);
  for (unsigned i = 0; i < blocks.x; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), die);
  std::deque<unsigned> coming(order.begin(), order.end());
  std::vector<std::unique_ptr<Block>> alive;
  while (!coming.empty() || !alive.empty()) {
    while (!coming.empty() && static_cast<int>(alive.size()) < settings.resident) {
      alive.push_back(begin(coming.front(), shared_bytes));
      coming.pop_front();
    }
    if (ready.empty() && late.empty()) {
      error = standstill(*alive.front());
      return error.c_str();  // its stacks are lost, as the launch is
    }
    std::vector<Fiber*>& from = ready.empty() ? late : ready;
    const size_t next = ahead && die() % 64 ? from.size() - 1 : die() % from.size();
    Fiber* fiber = from[next];
    from[next] = from.back();
    from.pop_back();
    Block* its = fiber->block;
    switch_to(fiber);
    if (stopped) return error.c_str();
    if (its->done == its->fibers.size()) {
      for (Fiber& each : its->fibers) stacks.push_back(each.stack);
      std::erase_if(alive, [&](const auto& each) { return each.get() == its; });
    }
  }
  return nullptr;
}

}  // namespace simt

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void simt_configure(uint64_t seed, int multiprocessors, int resident) {
  simt::settings.seed = seed;
  simt::settings.multiprocessors = multiprocessors;
  simt::settings.resident = std::max(resident, 1);
}

EXPORT long simt_launches() { return simt::settings.launches; }
