// Runs a kernel: its blocks one after the other, their warps from barrier to barrier.
#include "machine.h"

#include <algorithm>

namespace ptx {
namespace {

struct Launch {
  uint32_t grid[3], threads;
  uint64_t shared_bytes, seed;
};

void set_specials(Warp& w, const Launch& launch, const uint32_t* block) {
  for (const Special& special : w.program->specials) {
    const size_t dot = special.name.find('.');
    const std::string name = special.name.substr(1, dot - 1);
    const unsigned axis =
        dot == std::string::npos ? 0 : static_cast<unsigned>(special.name[dot + 1] - 'x');
    uint32_t* values = w.lane_values<uint32_t>(special.place);
    for (unsigned l = 0; l < kLanes; ++l) {
      uint32_t value = axis == 0 ? w.index * kLanes + l : 0;  // tid
      if (name == "laneid") value = l;
      if (name == "warpid") value = w.index;
      if (name == "ntid") value = axis == 0 ? launch.threads : 1;
      if (name == "ctaid") value = block[axis];
      if (name == "nctaid") value = launch.grid[axis];
      values[l] = value;
    }
  }
}

void set_constants(Warp& w) {
  for (const Constant& constant : w.program->constants)
    for (unsigned l = 0; l < kLanes; ++l) w.put(constant.place, constant.width, l, constant.value);
}

std::string standstill(const std::vector<Warp>& warps) {
  unsigned waiting = 0;
  for (const Warp& w : warps) waiting += w.waits;
  return std::to_string(waiting) + " of " + std::to_string(warps.size()) +
         " warps wait at a barrier, the others ended";
}

void run_block(std::vector<Warp>& warps, Memory& memory, const Launch& launch,
               const uint32_t* block, std::mt19937_64& die) {
  memory.block_first = ++memory.phase;
  std::fill(memory.shared.begin(), memory.shared.end(), static_cast<char>(0xff));
  std::vector<Warp*> order;
  for (Warp& w : warps) {
    set_specials(w, launch, block);
    w.begin();
    order.push_back(&w);
  }
  if (memory.parted) return run_parted(order, memory);
  for (bool alive = true; alive;) {
    std::shuffle(order.begin(), order.end(), die);
    for (Warp* w : order) w->go();
    const auto done =
        std::count_if(warps.begin(), warps.end(), [](const Warp& w) { return w.done; });
    alive = done == 0;
    if (alive == false && done != static_cast<std::ptrdiff_t>(warps.size()))
      throw Fault(standstill(warps));
    meet(order);
    ++memory.phase;
    memory.settled = memory.fences;
  }
}

}  // namespace

void Warp::begin() {
  apart = {{0, kAll, kNowhere}};
  waits = done = false;
  copies.clear();
  readings.clear();
  knows.clear();
  heard.clear();
  tells.clear();
  held = nullptr;
  if (!memory->parted) return;
  clock.assign(3 * memory->warps, memory->block_first);
  lanes_meet();
}

bool Warp::comes_after(uint32_t phase, uint32_t warps) const {
  uint32_t left = warps;
  for (const Past& past : knows)
    if (past.first <= phase && phase < past.last)
      left &= past.warp == kNowhere ? 0 : ~(1u << past.warp);
  return left == 0;
}

void Warp::fence() {
  knows.insert(knows.end(), heard.begin(), heard.end());
  heard.clear();
  tells = knows;
  if (memory->parted) {
    const auto warps = clock.begin() + memory->warps;
    clock[index] = std::max(clock[index], own());
    tells.push_back({memory->block_first, *std::min_element(clock.begin(), warps), kNowhere});
    for (unsigned v = 0; v < memory->warps; ++v)
      tells.push_back({memory->block_first, clock[v], v});
    ++memory->phase;
    return;
  }
  tells.push_back({memory->block_first, memory->phase, kNowhere});
  tells.push_back({memory->phase, memory->phase + 1, index});
}

void Warp::end() {
  if (!copies.empty()) throw Fault("a copy that its thread has not waited for");
  if (!readings.empty()) throw Fault("a product that its warp has not waited for");
  done = true;
}

void Warp::branch(const Instruction& i) {
  const Fragment all = apart.back();
  const auto target = static_cast<uint32_t>(i.number);
  if (on == all.lanes || on == 0) {
    apart.back().pc = on ? target : all.pc + 1;
    return;
  }
  apart.back().pc = i.o[0];  // the lanes of both ways, when they have met
  apart.push_back({all.pc + 1, all.lanes & ~on, i.o[0]});
  apart.push_back({target, on, i.o[0]});
}

void Warp::work(const Instruction& i) {
  try {
    i.run(*this, i);
  } catch (const Fault& fault) {
    throw Fault(program->where(i.line) + ", warp " + std::to_string(index) + ": " + fault.what());
  }
}

void Warp::go() {
  while (true) {
    while (!apart.empty() && (apart.back().lanes == 0 || apart.back().pc == apart.back().meeting))
      apart.pop_back();
    if (apart.empty()) return end();
    Fragment& at = apart.back();
    const Instruction& i = program->code[at.pc];
    on = at.lanes;
    if (i.guard != kNowhere) on &= i.unless ? ~predicate(i.guard) : predicate(i.guard);
    if (memory->traffic) ++memory->traffic->issued;
    switch (i.kind) {
      case Kind::plain:
        if (on) work(i);
        ++at.pc;
        break;
      case Kind::meeting:
        held = nullptr;
        if (on) work(i);
        if (held) {  // and runs it again
          if (memory->traffic) --memory->traffic->issued;
          return;
        }
        ++at.pc;
        if ((*memory->die)() % 4 == 0) return;  // another warp may be faster
        break;
      case Kind::branch:
        branch(i);
        break;
      case Kind::exit:
        ++at.pc;
        for (Fragment& each : apart) each.lanes &= ~on;
        break;
      case Kind::barrier:
        if (on != kAll)
          throw Fault(program->where(i.line) + ": a barrier that a part of a warp's lanes reach");
        ++at.pc;
        waits = true;
        held = &i;
        vote_to = i.o[0];
        votes = vote_to == kNowhere ? 0 : predicate(i.o[1]);
        return;
    }
  }
}

void launch(const Program& program, const Launch& how, const char* parameters,
            std::vector<Range> ranges, Traffic* traffic) {
  if ((program.threads && program.threads != how.threads) || program.most_threads < how.threads ||
      how.threads % kLanes)
    throw Fault("a launch of another number of threads than was compiled for");
  const size_t granules = how.shared_bytes / program.granule[0] + 1;
  Memory memory{&program, std::vector<char>(how.shared_bytes), Touches(granules),
                std::move(ranges)};
  memory.launch_first = 1;
  memory.traffic = traffic;
  memory.fences.assign(how.threads / kLanes, 0);
  memory.settled = memory.fenced = memory.fences;
  std::mt19937_64 die(how.seed);
  if (program.parted) {
    memory.parted = true;
    memory.granules = granules;
    memory.warps = how.threads / kLanes;
    memory.last = Zeros<Last>(granules * memory.warps);
    memory.die = &die;
  }
  std::vector<Warp> warps(how.threads / kLanes);
  for (unsigned n = 0; n < warps.size(); ++n) {
    warps[n].program = &program;
    warps[n].memory = &memory;
    warps[n].parameters = parameters;
    warps[n].index = n;
    warps[n].registers.assign(program.bytes, static_cast<char>(0xff));
    set_constants(warps[n]);
  }
  std::vector<uint64_t> blocks(uint64_t{how.grid[0]} * how.grid[1] * how.grid[2]);
  for (size_t n = 0; n < blocks.size(); ++n) blocks[n] = n;
  std::shuffle(blocks.begin(), blocks.end(), die);
  for (uint64_t number : blocks) {
    const uint32_t block[3] = {static_cast<uint32_t>(number % how.grid[0]),
                               static_cast<uint32_t>(number / how.grid[0] % how.grid[1]),
                               static_cast<uint32_t>(number / how.grid[0] / how.grid[1])};
    try {
      run_block(warps, memory, how, block, die);
    } catch (const Fault& fault) {
      throw Fault(program.name + ", block " + std::to_string(block[0]) + " " +
                  std::to_string(block[1]) + " " + std::to_string(block[2]) + ": " + fault.what());
    }
  }
}

}  // namespace ptx

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {
std::string error;  // of the last call
}

EXPORT const char* ptx_error() { return error.c_str(); }

// A program, to be kept for good; null: ptx_error says why.
EXPORT void* ptx_read(const char* text) {
  try {
    return ptx::read(text).release();
  } catch (const std::exception& e) {
    error = e.what();
    return nullptr;
  }
}

// Bytes of them.
EXPORT unsigned ptx_parameters(const void* program) {
  return static_cast<const ptx::Program*>(program)->parameters;
}

// ranges: first and last of each piece of global memory that the kernel may touch; traffic: null,
// or what is to be counted. 0, or ptx_error says what.
EXPORT int ptx_launch(const void* program, const uint32_t* grid, uint32_t threads,
                      uint64_t shared_bytes, const char* parameters, const uint64_t* ranges,
                      unsigned count, uint64_t seed, ptx::Traffic* traffic) {
  try {
    const auto& kernel = *static_cast<const ptx::Program*>(program);
    std::vector<ptx::Range> memory;
    for (unsigned n = 0; n < count; ++n) {
      const uint64_t first = ranges[2 * n], last = ranges[2 * n + 1];
      memory.push_back({first, last, ptx::Touches((last - first) / kernel.granule[1] + 2)});
    }
    ptx::launch(kernel, {{grid[0], grid[1], grid[2]}, threads, shared_bytes, seed}, parameters,
                std::move(memory), traffic);
    return 0;
  } catch (const std::exception& e) {
    error = e.what();
    return 1;
  }
}
