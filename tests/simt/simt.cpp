// The scheduler of simt.h, and the functions by which tests steer it.
#include "simt.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

namespace simt {
namespace {

constexpr size_t kStack = 256 << 10;  // taken up only as far as it is used
constexpr unsigned kWarp = 32;

enum class State { ready, at_barrier, at_exchange, done };

struct Block;

struct Fiber {
  ucontext_t context;
  char* stack = nullptr;
  Block* block = nullptr;
  Dim thread;
  unsigned index = 0;
  State state = State::ready;
  unsigned mask = 0;            // of the exchange that it waits in
  uint64_t values[2] = {0, 0};  // exchanges take turns: a lane may be one ahead of another
  int turn = 0;
};

struct Block {
  Dim position;
  std::vector<Fiber> fibers;
  std::unique_ptr<char[]> memory;
  unsigned at_barrier = 0, done = 0;
};

struct {
  uint64_t seed = 1;
  int multiprocessors = 2, resident = 2;
  long launches = 0;
} settings;

Fiber* running = nullptr;
ucontext_t scheduler;
const std::function<void()>* work = nullptr;
std::vector<Fiber*> ready, late;  // late ones go on only where no other can
unsigned laggard = 0;             // the warp of every block that is late; beyond all: none
std::vector<char*> stacks;
std::mt19937_64 die;
std::string error;

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
  swapcontext(&me->context, &scheduler);
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
  (void)ends;
  swapcontext(&me->context, &scheduler);
#endif
}

void switch_to(Fiber* fiber) {
  running = fiber;
  thread = fiber->thread;
  block = fiber->block->position;
#ifdef __SANITIZE_ADDRESS__
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, fiber->stack, kStack);
  swapcontext(&scheduler, &fiber->context);
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
  swapcontext(&scheduler, &fiber->context);
#endif
  running = nullptr;
}

void entry() {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_size);
#endif
  (*work)();
  running->state = State::done;
  ++running->block->done;
  switch_to_scheduler(true);
}

char* new_stack() {
  if (!stacks.empty()) {
    char* stack = stacks.back();
    stacks.pop_back();
    return stack;
  }
  void* memory = mmap(nullptr, kStack, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  return static_cast<char*>(memory);
}

void prepare(Fiber& fiber, Block& block, unsigned index) {
  fiber.block = &block;
  fiber.index = index;
  fiber.thread = Dim(index, 0, 0);
  fiber.stack = new_stack();
  getcontext(&fiber.context);
  fiber.context.uc_stack = {fiber.stack, 0, kStack};
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
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
         std::to_string(exchanging) + " in a shuffle, " + std::to_string(block.done) +
         " have ended";
}

}  // namespace

void* shared() { return running->block->memory.get(); }
int multiprocessors() { return settings.multiprocessors; }

void let_others() {
  enlist(running);
  if (!ready.empty()) std::swap(ready.back(), ready[die() % ready.size()]);
  switch_to_scheduler(false);
}

void barrier() {
  Block& mine = *running->block;
  running->state = State::at_barrier;
  if (++mine.at_barrier == mine.fibers.size()) {  // a thread that has ended never comes: an error
    mine.at_barrier = 0;
    for (Fiber& fiber : mine.fibers) wake(fiber);
  }
  switch_to_scheduler(false);
}

uint64_t exchange(unsigned mask, uint64_t value, unsigned lane) {
  Fiber& me = *running;
  Block& mine = *me.block;
  const unsigned first = me.index / kWarp * kWarp;
  const int turn = me.turn;
  me.turn ^= 1;
  me.values[turn] = value;
  me.mask = mask;
  me.state = State::at_exchange;
  bool all = true;
  for (unsigned i = 0; i < kWarp; ++i) {
    if (!(mask >> i & 1)) continue;
    if (first + i >= mine.fibers.size()) {
      all = false;
      continue;
    }
    const Fiber& other = mine.fibers[first + i];
    all = all && other.state == State::at_exchange && other.mask == mask && other.turn == me.turn;
  }
  if (all)
    for (unsigned i = 0; i < kWarp; ++i)
      if (mask >> i & 1) wake(mine.fibers[first + i]);
  switch_to_scheduler(false);
  if (lane >= kWarp || !(mask >> lane & 1)) return ~uint64_t{0};  // undefined on a GPU, NaN here
  return mine.fibers[first + lane].values[turn];
}

const char* launch(Dim blocks, Dim block_threads, size_t shared_bytes,
                   const std::function<void()>& body) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  error.clear();
  if (blocks.x < 1 || block_threads.x < 1 || block_threads.x > 1024 || shared_bytes > 48 << 10)
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
