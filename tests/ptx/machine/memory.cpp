// Memory, and who touches it. An access outside of what the launch was given, or not aligned, is a
// Fault; so is a pair of accesses, one of them a write, by two warps between the same barriers, by
// two lanes of a warp that have not waited for one another, or by two blocks of a launch, and any
// access to what a copy under way will write.
//
// Parted programs have rules of their own (order.cpp).
//
// Blocks come after one another by atomics and fences, as PTX's memory model has it: what was
// before a warp's fence is told by its atomics that follow, and a warp whose atomic meets it comes
// after it from its next fence on; barriers pass it on to the block.
#include <algorithm>

#include "types.h"

namespace ptx {
namespace {

// One granule; `first` is the phase that the memory's life begins with: what was before does not
// count. A second warp may write what is there already, as it does where a layout has an element
// twice.
void touch(Warp& w, Touch& t, Access access, uint32_t line, uint32_t first, bool asynchronous,
           bool same, unsigned lane) {
  const Memory& m = *w.memory;
  const uint32_t now = m.phase;
  const auto fault = [&](const char* what) {
    throw Fault(what + (", written at " + w.program->where(t.line)));
  };
  const auto other = [&](unsigned its, uint32_t step) {  // lane, that this one has not waited for
    return step == w.step && (its != lane || lane == kSeveral);
  };
  if (access == Access::settle) {
    t.flight = 0;
  } else if (t.flight != 0) {
    fault("touches what a copy under way will write");
  }
  if (t.wrote >= first) {
    const bool atomics = access == Access::atomic && t.atomic;  // which have an order of their own
    if (t.wrote == now ? t.writer != w.index && !same
                       : t.wrote < m.block_first && !w.comes_after(t.wrote, 1u << t.writer))
      if (!atomics) fault("races with a write");
    if (t.wrote == now && t.writer == w.index && !same && other(t.wrote_lane, t.wrote_step) &&
        !atomics)
      fault("races with a write of another lane");
    // a fence has to stand between: of the one that wrote, before the barrier, or of this one after
    // it
    const bool same_warp = t.writer == w.index && t.fence <= m.fences[w.index];
    if (asynchronous && t.fence > m.settled[t.writer] && m.fenced[w.index] <= t.wrote && !same_warp)
      fault("a matrix unit reads what no fence has made visible to it");
  }
  if (access == Access::read) {
    if (t.read != now) {
      if (t.read >= first && t.read < m.block_first && !w.comes_after(t.read, t.readers))
        t.before = t.read;
      t.read = now;
      t.readers = 0;
    }
    t.read_lane =
        static_cast<uint8_t>(t.readers && other(t.read_lane, t.read_step) ? kSeveral : lane);
    t.read_step = w.step;
    t.readers |= 1u << w.index;
    return;
  }
  if (t.read >= first &&
      (t.read == now ? (t.readers & ~(1u << w.index)) != 0
                     : t.read < m.block_first && !w.comes_after(t.read, t.readers)))
    throw Fault("writes what another warp or block may still read");
  if (t.read == now && other(t.read_lane, t.read_step))
    throw Fault("writes what another lane may still read");
  if (t.before >= first && t.before < m.block_first && !w.comes_after(t.before, kAll))
    throw Fault("writes what another block may still read");
  t.wrote = now;
  t.atomic = access == Access::atomic;
  t.writer = static_cast<uint16_t>(w.index);
  t.wrote_lane = static_cast<uint8_t>(lane);
  t.wrote_step = w.step;
  t.line = line;
}

// Loads and stores of each lane: `list` are the registers of its elements. Spaces are shared and
// global memory and parameters.
template <char kSpace>
char* at(Warp& w, const Instruction& i, unsigned lane, unsigned bytes, Access access,
         const char* value = nullptr) {
  const auto offset = static_cast<uint64_t>(i.number);
  if constexpr (kSpace == 'p') {
    const uint64_t first = w.lane_values<uint64_t>(i.o[0])[lane] + offset;
    if (first + bytes > w.program->parameters) throw Fault("reads past the parameters");
    return const_cast<char*>(w.parameters) + first;
  }
  if constexpr (kSpace == 's') {
    const auto address = static_cast<uint32_t>(w.lane_values<uint32_t>(i.o[0])[lane] + offset);
    return shared_at(w, lane, address, bytes, access, i.line, false, value);
  } else {
    return global_at(w, lane, w.lane_values<uint64_t>(i.o[0])[lane] + offset, bytes, access, i.line,
                     value);
  }
}

template <char kSpace>
void count(Warp& w, const Instruction& i, unsigned bytes) {
  if (w.memory->traffic == nullptr) return;
  uint64_t addresses[kLanes];
  for (unsigned l = 0; l < kLanes; ++l)
    addresses[l] = w.get(i.o[0], kSpace == 's' ? 4 : 8, l) + static_cast<uint64_t>(i.number);
  if (kSpace == 's')
    w.memory->traffic->shared(addresses, w.on, bytes);
  else
    w.memory->traffic->global(addresses, w.on, bytes);
}

template <char kSpace>
void load(Warp& w, const Instruction& i) {
  const unsigned bytes = i.width * static_cast<unsigned>(i.list.size());
  if constexpr (kSpace != 'p') count<kSpace>(w, i, bytes);
  for (unsigned l = 0; l < kLanes; ++l) {
    if (!(w.on >> l & 1)) continue;
    const char* source = at<kSpace>(w, i, l, bytes, Access::read);
    for (uint32_t place : i.list) {
      uint64_t value = 0;
      std::memcpy(&value, source, i.width);
      source += i.width;
      const unsigned unused = 64 - 8 * i.width;
      if (i.sign) value = static_cast<uint64_t>(static_cast<int64_t>(value << unused) >> unused);
      if (place != kNowhere) w.put(place, i.to, l, value);
    }
  }
}

template <char kSpace>
void store(Warp& w, const Instruction& i) {
  const unsigned bytes = i.width * static_cast<unsigned>(i.list.size());
  count<kSpace>(w, i, bytes);
  for (unsigned l = 0; l < kLanes; ++l) {
    if (!(w.on >> l & 1)) continue;
    char values[16];
    for (size_t n = 0; n < i.list.size(); ++n) {
      const uint64_t value = w.get(i.list[n], i.to, l);
      std::memcpy(values + n * i.width, &value, i.width);
    }
    std::memcpy(at<kSpace>(w, i, l, bytes, Access::write, values), values, bytes);
  }
}

// atom.global.add.u32: the value before; lanes take turns
void add_at(Warp& w, const Instruction& i) {
  uint32_t* before = w.lane_values<uint32_t>(i.o[1]);
  const uint32_t* term = w.lane_values<uint32_t>(i.o[2]);
  for (unsigned l = 0; l < kLanes; ++l) {
    if (!(w.on >> l & 1)) continue;
    const uint64_t address = w.lane_values<uint64_t>(i.o[0])[l] + static_cast<uint64_t>(i.number);
    char* place = global_at(w, l, address, 4, Access::atomic, i.line);
    uint32_t value;
    std::memcpy(&value, place, 4);
    before[l] = value;
    value += term[l];
    std::memcpy(place, &value, 4);
    std::vector<Past>& told = w.memory->told[address];
    w.heard.insert(w.heard.end(), told.begin(), told.end());
    told.insert(told.end(), w.tells.begin(), w.tells.end());
  }
}

// cp.async: begun here, and done when its thread waits for it. Until then its target is poisoned.
void begin_copies(Warp& w, const Instruction& i) {
  const auto bytes = static_cast<unsigned>(i.width);
  uint64_t sources[kLanes];
  uint32_t reads = 0;
  for (unsigned l = 0; l < kLanes; ++l) {
    if (!(w.on >> l & 1)) continue;
    const auto target = static_cast<uint32_t>(w.lane_values<uint32_t>(i.o[0])[l] + i.number);
    unsigned read = bytes;
    if (i.o[2] != kNowhere) read = w.lane_values<uint32_t>(i.o[2])[l];
    if (read > bytes) throw Fault("a copy reads more than it writes");
    const char* source = nullptr;
    sources[l] = w.lane_values<uint64_t>(i.o[1])[l] + i.list[0];
    if (read) source = global_at(w, l, sources[l], read, Access::read, i.line);
    if (read) reads |= 1u << l;
    std::memset(shared_at(w, l, target, bytes, Access::copy, i.line), 0xff, bytes);
    const unsigned granule = w.program->granule[0];
    for (uint32_t a = target / granule; a <= (target + bytes - 1) / granule; ++a) {
      w.memory->touches[a].flight = static_cast<uint16_t>(1 + w.index);
      w.memory->touches[a].fence = 0;
    }
    w.copies.push_back({target, source, bytes, read, w.copy_group, i.line, l, w.memory->phase});
  }
  if (w.memory->traffic) w.memory->traffic->global(sources, reads, bytes);
}

void commit_copies(Warp& w, const Instruction&) {
  ++w.copy_group;
  if (w.memory->parted) w.commits.push_back(w.memory->phase++);
}

void wait_for_copies(Warp& w, const Instruction& i) {
  const int groups = w.copy_group - static_cast<int>(i.number);  // that are complete
  if (w.memory->parted && groups > 0) {
    uint32_t& copies = w.clock[w.memory->warps + w.index];
    copies = std::max(copies, w.commits[static_cast<size_t>(groups) - 1] + 1);
  }
  std::erase_if(w.copies, [&](const Copy& copy) {
    if (copy.group >= groups) return false;
    char* target = shared_at(w, copy.lane, copy.target, copy.bytes, Access::settle, copy.line);
    std::memset(target, 0, copy.bytes);
    if (copy.read) std::memcpy(target, copy.source, copy.read);
    return true;
  });
}

// ldmatrix, stmatrix: 8 x 8 matrices of 16 bits, of which lane l holds two neighbours of row l / 4.
// i.width of them; lanes 8 n to 8 n + 7 have the addresses of the rows of matrix n.
template <bool kStore, bool kTransposed>
void matrices(Warp& w, const Instruction& i) {
  w.together(kStore ? "stmatrix" : "ldmatrix");
  const uint32_t* addresses = w.lane_values<uint32_t>(i.o[0]);
  for (unsigned n = 0; n < i.width; ++n) {
    uint32_t* lanes = w.lane_values<uint32_t>(i.list.at(n));
    if (w.memory->traffic) {
      uint64_t rows[kLanes];
      for (unsigned r = 0; r < 8; ++r)
        rows[r] = addresses[8 * n + r] + static_cast<uint64_t>(i.number);
      w.memory->traffic->shared(rows, 0xff, 16);
    }
    uint16_t values[8][8];
    if (kStore)
      for (unsigned l = 0; l < kLanes; ++l)
        for (unsigned e = 0; e < 2; ++e) {
          const unsigned row = l / 4, column = l % 4 * 2 + e;
          (kTransposed ? values[column][row] : values[row][column]) =
              static_cast<uint16_t>(lanes[l] >> 16 * e);
        }
    for (unsigned r = 0; r < 8; ++r) {
      const auto address = static_cast<uint32_t>(addresses[8 * n + r] + i.number);
      const char* value = kStore ? reinterpret_cast<const char*>(values[r]) : nullptr;
      char* row = shared_at(w, kSeveral, address, 16, kStore ? Access::write : Access::read, i.line,
                            false, value);
      if (kStore)
        std::memcpy(row, values[r], 16);
      else
        std::memcpy(values[r], row, 16);
    }
    if (kStore) continue;
    for (unsigned l = 0; l < kLanes; ++l) {
      const unsigned row = l / 4, column = l % 4 * 2;
      const auto value = [&](unsigned c) -> uint32_t {
        return kTransposed ? values[c][row] : values[row][c];
      };
      lanes[l] = value(column) | value(column + 1) << 16;
    }
  }
}

bool decode_access(const Statement& from, Names& names, Instruction& made) {
  const bool loads = from.parts[0] == "ld";
  const std::string& type = from.parts.back();
  const std::string &values = from.operands.at(loads ? 0 : 1),
                    &address = from.operands.at(loads ? 1 : 0);
  made.width = static_cast<uint8_t>(width_of(type));
  made.sign = type[0] == 's';
  const bool parameter = from.has("param"), global = from.has("global"),
             shared = from.has("shared") || from.has("shared::cta");
  if (!(parameter && loads) && !global && !shared) return false;
  names.address(address, shared ? 4 : 8, made);
  unsigned to = made.width;
  for (const std::string& one : names.vector(values)) {
    if (names.is_register(one)) to = names.reg(one).width;
    made.list.push_back(names.place(one, to));
  }
  made.to = static_cast<uint8_t>(to);
  if (parameter) {
    made.run = load<'p'>;
    return true;
  }
  unsigned& granule = names.program.granule[shared ? 0 : 1];
  granule = std::min(granule, static_cast<unsigned>(made.width));
  if (loads) made.run = shared ? load<'s'> : load<'g'>;
  if (!loads) made.run = shared ? store<'s'> : store<'g'>;
  return true;
}

bool decode_copy(const Statement& from, Names& names, Instruction& made) {  // of cp.async
  if (from.has("commit_group")) {
    made.run = commit_copies;
  } else if (from.has("wait_group")) {
    made.run = wait_for_copies;
    made.number = std::stoi(from.operands.at(0));
  } else if (from.has("shared") && from.has("global")) {
    Instruction source;
    names.address(from.operands.at(1), 8, source);
    names.address(from.operands.at(0), 4, made);
    made.o[1] = source.o[0];
    made.list.push_back(static_cast<uint32_t>(source.number));
    made.width = static_cast<uint8_t>(std::stoi(from.operands.at(2), nullptr, 0));
    if (from.operands.size() > 3) made.o[2] = names.place(from.operands[3], 4);
    names.program.granule[0] = std::min<unsigned>(names.program.granule[0], made.width);
    names.program.granule[1] = std::min(names.program.granule[1], 2u);  // may read a part
    made.run = begin_copies;
  }
  return made.run != nullptr;
}

}  // namespace

std::string hexadecimal(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "%#llx", static_cast<unsigned long long>(value));
  return text;
}

char* shared_at(Warp& w, unsigned lane, uint32_t address, unsigned bytes, Access access,
                uint32_t line, bool asynchronous, const char* value) {
  Memory& m = *w.memory;
  if (uint64_t{address} + bytes > m.shared.size() || address % bytes)
    throw Fault(hexadecimal(address) + " is no place for " + std::to_string(bytes) +
                " bytes of shared memory, of " + std::to_string(m.shared.size()));
  const unsigned granule = w.program->granule[0];
  const bool same = value && std::memcmp(m.shared.data() + address, value, bytes) == 0;
  for (uint32_t a = address / granule; a <= (address + bytes - 1) / granule; ++a) {
    Touch& t = m.touches[a];
    if (m.parted)
      touch_shared(w, a, access, line, asynchronous, same, lane);
    else
      touch(w, t, access, line, m.block_first, asynchronous, same, lane);
    if (access == Access::write) t.fence = 1 + m.fences[w.index];
  }
  return m.shared.data() + address;
}

char* global_at(Warp& w, unsigned lane, uint64_t address, unsigned bytes, Access access,
                uint32_t line, const char* value) {
  Memory& m = *w.memory;
  const auto inside = [&](const Range& range) {
    return address >= range.first && address + bytes <= range.last;
  };
  if (m.found >= m.ranges.size() || !inside(m.ranges[m.found])) {
    m.found = 0;
    while (m.found < m.ranges.size() && !inside(m.ranges[m.found])) ++m.found;
    if (m.found == m.ranges.size()) {
      std::string nearest = "no tensor";
      for (const Range& r : m.ranges)
        if (address + 4096 >= r.first && address < r.last + 4096)
          nearest = "a tensor of " + std::to_string(r.last - r.first) + " bytes, at " +
                    std::to_string(static_cast<int64_t>(address - r.first));
      throw Fault(hexadecimal(address) + ", " + std::to_string(bytes) + " bytes, lies outside of " +
                  nearest);
    }
  }
  if (std::has_single_bit(bytes) && address % bytes != 0)  // a part of a copy may have any size
    throw Fault(hexadecimal(address) + " is not aligned to " + std::to_string(bytes) + " bytes");
  Range& range = m.ranges[m.found];
  const unsigned granule = w.program->granule[1];
  const uint64_t first = address / granule - range.first / granule;
  const uint64_t last = (address + bytes - 1) / granule - range.first / granule;
  char* place = reinterpret_cast<char*>(address);
  const bool same = value && std::memcmp(place, value, bytes) == 0;
  for (uint64_t a = first; a <= last; ++a)
    if (m.parted)
      touch_global(w, range.touches[a], access, line, same, lane);
    else
      touch(w, range.touches[a], access, line, m.launch_first, false, same, lane);
  return place;
}

bool decode_memory(const Statement& from, Names& names, Instruction& made) {
  const std::string& name = from.parts[0];
  if (name == "ld" || name == "st") return decode_access(from, names, made);
  if (name == "cp" && from.has("async")) return decode_copy(from, names, made);
  if (from.opcode == "atom.global.add.u32") {
    names.address(from.operands.at(1), 8, made);
    made.o[1] = names.place(from.operands.at(0), 4);
    made.o[2] = names.place(from.operands.at(2), 4);
    names.program.granule[1] = std::min(names.program.granule[1], 4u);
    made.run = add_at;
    return true;
  }
  if (name != "ldmatrix" && name != "stmatrix") return false;
  const bool stores = name == "stmatrix", transposed = from.has("trans");
  if (!from.has("m8n8") || !from.has("b16")) return false;
  names.address(from.operands.at(stores ? 0 : 1), 4, made);
  for (const std::string& one : names.vector(from.operands.at(stores ? 1 : 0)))
    made.list.push_back(names.place(one, 4));
  made.width = static_cast<uint8_t>(made.list.size());
  names.program.granule[0] = std::min(names.program.granule[0], 16u);
  if (stores) made.run = transposed ? matrices<true, true> : matrices<true, false>;
  if (!stores) made.run = transposed ? matrices<false, true> : matrices<false, false>;
  return true;
}

}  // namespace ptx
