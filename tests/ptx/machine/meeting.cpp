// Where warps meet: barriers, and in a parted program barriers of some of them, mbarriers, and
// copies that arrive at these by themselves.
//
// A warp of a parted program runs until it has to wait, or by chance to its next mbarrier; then any
// that can go on is next. Copies that arrive by themselves do so at any time, in every other block
// as late as they can.
#include <algorithm>

#include "machine.h"

namespace ptx {
namespace {

void join(Clock& into, const Clock& from) {
  for (size_t n = 0; n < into.size(); ++n) into[n] = std::max(into[n], from[n]);
}

std::string number(uint32_t value) { return std::to_string(value); }

Mbarrier& at(Warp& w, unsigned lane, uint32_t address, uint32_t line) {
  const auto found = w.memory->mbarriers.find(address);
  if (found == w.memory->mbarriers.end())
    throw Fault("no mbarrier is initialised at " + hexadecimal(address));
  shared_at(w, lane, address, 8, Access::atomic, line);
  return found->second;
}

uint32_t address_of(Warp& w, const Instruction& i, unsigned lane) {
  return static_cast<uint32_t>(w.lane_values<uint32_t>(i.o[0])[lane] + i.number);
}

void mark(Memory& m, uint32_t address, bool barrier) {
  const unsigned granule = m.program->granule[0];  // 8 or less
  for (uint32_t a = address / granule; a <= (address + 7) / granule; ++a)
    m.touches[a].barrier = barrier;
}

// A lane writes an mbarrier's 8 bytes: nothing that a program may read.
void overwrite(Warp& w, unsigned lane, uint32_t address, uint32_t line) {
  std::memset(shared_at(w, lane, address, 8, Access::write, line), 0xff, 8);
}

void initialise(Warp& w, const Instruction& i) {
  for (unsigned l = 0; l < kLanes; ++l) {
    if (!(w.on >> l & 1)) continue;
    const uint32_t address = address_of(w, i, l), count = w.lane_values<uint32_t>(i.o[1])[l];
    if (count == 0 || count >= 1u << 20) throw Fault("an mbarrier for " + number(count));
    overwrite(w, l, address, i.line);
    mark(*w.memory, address, true);
    const Clock none(w.clock.size());
    w.memory->mbarriers[address] = {count, count, 0, none, none};
  }
}

void invalidate(Warp& w, const Instruction& i) {
  for (unsigned l = 0; l < kLanes; ++l) {
    if (!(w.on >> l & 1)) continue;
    const uint32_t address = address_of(w, i, l);
    at(w, l, address, i.line);
    w.memory->mbarriers.erase(address);
    mark(*w.memory, address, false);
    overwrite(w, l, address, i.line);
  }
}

void arrive(Mbarrier& b, uint32_t count, const Clock& clock) {
  if (count == 0 || count > b.pending)
    throw Fault(number(count) + " arrivals at an mbarrier that waits for " + number(b.pending));
  join(b.gathers, clock);
  b.pending -= count;
  if (b.pending) return;
  b.pending = b.count;
  b.parity ^= 1;
  b.told = b.gathers;
  std::fill(b.gathers.begin(), b.gathers.end(), 0);
}

void arrive_lanes(Warp& w, const Instruction& i) {
  w.clock[w.index] = std::max(w.clock[w.index], w.own());
  for (unsigned l = 0; l < kLanes; ++l)
    if (w.on >> l & 1)
      arrive(at(w, l, address_of(w, i, l), i.line), w.lane_values<uint32_t>(i.o[1])[l], w.clock);
  ++w.memory->phase;
}

// Copies make known that they are complete, and what their warp came after when it asked for it. Of
// its own loads and stores PTX does not say so.
void bundle(Warp& w, const Instruction& i) {
  Memory& m = *w.memory;
  Bundle made{&w, w.on, m.phase, i.line, std::vector<uint32_t>(kLanes), w.clock};
  for (unsigned l = 0; l < kLanes; ++l) {
    if (!(w.on >> l & 1)) continue;
    made.at[l] = address_of(w, i, l);
    at(w, l, made.at[l], i.line);
  }
  made.clock[m.warps + w.index] = m.phase + 1;
  m.bundles.push_back(std::move(made));
  ++m.phase;
}

void complete(Memory& m, size_t which) {
  const Bundle made = std::move(m.bundles[which]);
  m.bundles.erase(m.bundles.begin() + static_cast<std::ptrdiff_t>(which));
  const unsigned granule = m.program->granule[0];
  std::erase_if(made.warp->copies, [&](const Copy& copy) {
    if (copy.when > made.when || !(made.lanes >> copy.lane & 1)) return false;
    for (uint32_t a = copy.target / granule; a <= (copy.target + copy.bytes - 1) / granule; ++a)
      m.touches[a].flight = 0;
    char* target = m.shared.data() + copy.target;
    std::memset(target, 0, copy.bytes);
    if (copy.read) std::memcpy(target, copy.source, copy.read);
    return true;
  });
  for (unsigned l = 0; l < kLanes; ++l) {
    if (!(made.lanes >> l & 1)) continue;
    const auto found = m.mbarriers.find(made.at[l]);
    try {
      if (found == m.mbarriers.end()) throw Fault("copies arrive where no mbarrier is any more");
      arrive(found->second, 1, made.clock);
    } catch (const Fault& fault) {
      throw Fault(m.program->where(made.line) + ", copies of warp " + number(made.warp->index) +
                  ": " + fault.what());
    }
  }
}

void wait_for_phase(Warp& w, const Instruction& i) {
  w.together("mbarrier.try_wait");
  w.mbarrier = address_of(w, i, 0);
  w.parity = w.lane_values<uint32_t>(i.o[1])[0];
  for (unsigned l = 1; l < kLanes; ++l)
    if (address_of(w, i, l) != w.mbarrier || w.lane_values<uint32_t>(i.o[1])[l] != w.parity)
      throw Fault("lanes that wait for different mbarriers or phases");
  if (w.parity > 1) throw Fault("a phase of parity " + number(w.parity));
  const Mbarrier& b = at(w, kSeveral, w.mbarrier, i.line);
  if (b.parity == w.parity) {
    w.held = &i;
    return;
  }
  join(w.clock, b.told);
  w.met = std::max(w.met, b.told[w.index]);  // of its own lanes
  w.set(i.o[2], kAll);
  ++w.memory->phase;
}

bool can_go(const Warp& w) {
  if (w.done || w.waits) return false;
  if (w.held == nullptr) return true;
  const auto found = w.memory->mbarriers.find(w.mbarrier);
  return found == w.memory->mbarriers.end() || found->second.parity != w.parity;
}

unsigned members(const Warp& w) { return w.held->width ? w.held->width : w.memory->warps; }

// Where `last` is the last one at its barrier, these go on.
void try_meeting(const std::vector<Warp*>& warps, const Warp& last) {
  std::vector<Warp*> there;
  for (Warp* w : warps)
    if (w->waits && w->held->number == last.held->number) there.push_back(w);
  for (const Warp* w : there)
    if (members(*w) != members(last))
      throw Fault("barrier " + number(static_cast<uint32_t>(last.held->number)) + " is for " +
                  number(members(*w)) + " warps at " + last.program->where(w->held->line) +
                  " and for " + number(members(last)) + " at " +
                  last.program->where(last.held->line));
  if (there.size() == members(last)) meet(there);
}

std::string standstill(std::vector<Warp*> warps) {
  std::sort(warps.begin(), warps.end(), [](Warp* a, Warp* b) { return a->index < b->index; });
  std::string text = "no warp can go on";
  for (const Warp* w : warps) {
    text += "; warp " + number(w->index);
    if (w->done) {
      text += " has ended";
      continue;
    }
    text += " waits at " + w->program->where(w->held->line);
    if (w->waits) {
      text += " at barrier " + number(static_cast<uint32_t>(w->held->number)) + " for " +
              number(members(*w)) + " warps";
    } else {
      const Mbarrier& b = w->memory->mbarriers.at(w->mbarrier);
      text += " for parity " + number(w->parity) + " of the mbarrier at " +
              hexadecimal(w->mbarrier) + ", which lacks " + number(b.pending) + " of " +
              number(b.count) + " arrivals";
    }
  }
  return text;
}

// bar.sync 1, 128: made.number is which, made.width for how many warps, or 0: all.
bool decode_barrier(const Statement& from, Names& names, Instruction& made) {
  const bool votes = from.opcode == "bar.red.or.pred";
  const auto constant = [&](const std::string& text) -> unsigned long {
    if (text.empty() || text.find_first_not_of("0123456789") != std::string::npos)
      throw Fault("no number of a barrier or of its threads: " + text);
    return std::stoul(text);
  };
  std::vector<std::string> numbers = from.operands;
  if (votes) {
    if (numbers.size() < 3) return false;
    made.o[0] = names.predicate(numbers.front());
    made.o[1] = names.predicate(numbers.back());
    numbers = {numbers.begin() + 1, numbers.end() - 1};
  }
  if (numbers.empty() || numbers.size() > 2) return false;
  made.kind = Kind::barrier;
  made.number = static_cast<int64_t>(constant(numbers[0]));
  if (made.number > 15) throw Fault("no barrier: " + numbers[0]);
  if (numbers.size() > 1) {
    const unsigned long threads = constant(numbers[1]);
    if (threads == 0 || threads > 1024 || threads % kLanes)
      throw Fault("a barrier of " + numbers[1] + " threads");
    made.width = static_cast<uint8_t>(threads / kLanes);
  }
  names.program.parted |= made.number != 0 || made.width != 0;
  return true;
}

}  // namespace

// All warps of a barrier are there: what they vote, and what they know of one another and of other
// blocks.
void meet(const std::vector<Warp*>& warps) {
  uint32_t votes = 0;
  std::vector<Past> known;
  Clock clock = warps[0]->clock;
  for (Warp* w : warps) {
    if ((w->vote_to == kNowhere) != (warps[0]->vote_to == kNowhere))
      throw Fault("some warps vote at a barrier, and others do not");
    votes |= w->votes;
    known.insert(known.end(), w->knows.begin(), w->knows.end());
    join(clock, w->clock);
  }
  std::sort(known.begin(), known.end());
  known.erase(std::unique(known.begin(), known.end()), known.end());
  if (!clock.empty()) {
    const uint32_t now = warps[0]->memory->phase + 1;
    for (const Warp* w : warps) clock[w->index] = now;
  }
  for (Warp* w : warps) {
    if (w->vote_to != kNowhere) w->predicate(w->vote_to) = votes ? kAll : 0;
    w->vote_to = kNowhere;
    w->votes = 0;
    w->knows = known;
    w->clock = clock;
    w->waits = false;
    w->held = nullptr;
    w->lanes_meet();
  }
}

void run_parted(const std::vector<Warp*>& warps, Memory& memory) {
  for (const auto& [address, each] : memory.mbarriers) mark(memory, address, false);
  memory.mbarriers.clear();
  std::mt19937_64& die = *memory.die;
  const bool late = die() % 2;
  while (true) {
    std::vector<Warp*> ready;
    std::copy_if(warps.begin(), warps.end(), std::back_inserter(ready),
                 [](Warp* w) { return can_go(*w); });
    const size_t bundles = memory.bundles.size();
    if (bundles && (ready.empty() || (!late && die() % 4 == 0))) {
      complete(memory, die() % bundles);
    } else if (ready.empty()) {
      break;
    } else {
      Warp& w = *ready[die() % ready.size()];
      w.go();
      if (w.waits) try_meeting(warps, w);
    }
  }
  if (!std::all_of(warps.begin(), warps.end(), [](Warp* w) { return w->done; }))
    throw Fault(standstill(warps));
}

bool decode_meeting(const Statement& from, Names& names, Instruction& made) {
  const std::string &name = from.parts[0], &opcode = from.opcode;
  if (opcode == "bar.sync" || opcode == "barrier.sync" || opcode == "bar.red.or.pred")
    return decode_barrier(from, names, made);
  if (name == "setmaxnreg") {
    made.run = [](Warp& w, const Instruction&) { w.together("setmaxnreg"); };
    return true;
  }
  if (opcode == "cp.async.mbarrier.arrive.noinc.shared.b64" ||
      opcode == "cp.async.mbarrier.arrive.noinc.shared::cta.b64") {
    names.address(from.operands.at(0), 4, made);
    made.run = bundle;
  } else if (name == "mbarrier" && from.parts.back() == "b64" && from.parts.size() > 3) {
    if (!from.has("shared") && !from.has("shared::cta")) return false;
    const std::string& what = from.parts[1];
    const std::vector<std::string>& operands = from.operands;
    if (what == "init" || what == "inval") {
      names.address(operands.at(0), 4, made);
      if (what == "init") made.o[1] = names.place(operands.at(1), 4);
      made.run = what == "init" ? initialise : invalidate;
    } else if (what == "arrive" && from.parts.size() == 4 && operands.at(0) == "_") {
      names.address(operands.at(1), 4, made);
      made.o[1] = names.place(operands.size() > 2 ? operands[2] : "1", 4);
      made.run = arrive_lanes;
    } else if (what == "try_wait" && from.parts[2] == "parity" && operands.size() == 3) {
      names.address(operands.at(1), 4, made);
      made.o[1] = names.place(operands[2], 4);
      made.o[2] = names.predicate(operands[0]);
      made.run = wait_for_phase;
    }
  }
  if (made.run == nullptr) return false;
  made.kind = Kind::meeting;
  names.program.parted = true;
  names.program.granule[0] = std::min(names.program.granule[0], 8u);
  return true;
}

}  // namespace ptx
