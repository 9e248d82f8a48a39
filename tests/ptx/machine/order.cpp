// Who touches memory in a parted program, and in what order: a warp comes after an access where its
// clock says so, and any other access to the same place, one of the two a write, is a race, whether
// or not the two came close to one another in this run.
//
// Copies to shared memory count as of another than the warp that began them: it, too, comes after
// them only where it has waited. Products read until they are waited for.
#include <algorithm>

#include "machine.h"

namespace ptx {
namespace {

Last& last_of(Memory& m, unsigned warp, uint32_t granule) {
  return m.last[warp * m.granules + granule];
}

// Whether a lane's access may be at once with that of another lane (`its`) in an earlier phase.
bool other_lane(const Warp& w, uint32_t phase, unsigned its, unsigned lane) {
  return phase >= w.met && (its != lane || lane == kSeveral);
}

void note_lanes(Warp& w, unsigned lane) { w.touched |= lane == kSeveral ? kAll : 1u << lane; }

bool after_writes(Warp& w, const Touch& t, uint32_t granule) {
  Memory& m = *w.memory;
  // those before the last one were before it
  if (t.writer != kMany) return t.writer == w.index || t.wrote < w.clock[t.writer];
  for (unsigned v = 0; v < m.warps; ++v) {
    const Last& its = last_of(m, v, granule);
    if ((v != w.index && its.wrote >= w.clock[v]) || its.copied >= w.clock[m.warps + v])
      return false;
  }
  return true;
}

bool visible_to_matrix_units(Warp& w, const Touch& t, uint32_t granule) {
  Memory& m = *w.memory;
  const uint32_t* visible = w.clock.data() + 2 * m.warps;
  if (t.fence == 0) return true;
  if (t.writer != kMany) return t.wrote < visible[t.writer];
  for (unsigned v = 0; v < m.warps; ++v)
    if (last_of(m, v, granule).wrote >= visible[v]) return false;
  return true;
}

void check_reads(Warp& w, uint32_t granule, unsigned lane) {
  Memory& m = *w.memory;
  for (unsigned v = 0; v < m.warps; ++v)
    if (v != w.index && last_of(m, v, granule).read >= w.clock[v])
      throw Fault("writes what another warp may still read");
  const Last& own = last_of(m, w.index, granule);
  if (own.read == kForever) throw Fault("writes what a product under way still reads");
  if (other_lane(w, own.read, own.read_lane, lane))
    throw Fault("writes what another lane may still read");
}

// Of global memory: 0 or more warps of this block or another, at the latest in this phase.
bool after_all(const Warp& w, uint32_t phase, uint32_t warps) {
  if (phase < w.memory->block_first) return w.comes_after(phase, warps);
  for (unsigned v = 0; v < w.memory->warps; ++v)
    if (warps >> v & 1 && v != w.index && phase >= w.clock[v]) return false;
  return true;
}

}  // namespace

void touch_shared(Warp& w, uint32_t granule, Access access, uint32_t line, bool asynchronous,
                  bool same, unsigned lane) {
  Memory& m = *w.memory;
  Touch& t = m.touches[granule];
  Last& own = last_of(m, w.index, granule);
  const auto fault = [&](const char* what) {
    throw Fault(what + (", written at " + w.program->where(t.line)));
  };
  if (access != Access::atomic) note_lanes(w, lane);  // not of an mbarrier
  if (access == Access::settle) {  // for this lane; for other warps it stays a copy
    t.flight = 0;
    own.wrote = m.phase;
    own.wrote_lane = static_cast<uint8_t>(lane);
    return;
  }
  if (t.barrier && access != Access::atomic) fault("touches an mbarrier as if it were memory");
  if (t.flight != 0) fault("touches what a copy under way will write");
  const bool after = after_writes(w, t, granule);
  if (!after && !same) fault("races with a write");
  if (other_lane(w, own.wrote, own.wrote_lane, lane) && !same)
    fault("races with a write of another lane");
  if (asynchronous && !visible_to_matrix_units(w, t, granule))
    fault("a matrix unit reads what no fence has made visible to it");
  if (access == Access::read || access == Access::atomic) {
    own.read_lane =
        static_cast<uint8_t>(other_lane(w, own.read, own.read_lane, lane) ? kSeveral : lane);
    own.read = asynchronous || own.read == kForever ? kForever : m.phase;
    return;
  }
  check_reads(w, granule, lane);
  const bool copy = access == Access::copy;
  (copy ? own.copied : own.wrote) = m.phase;
  if (!copy) own.wrote_lane = static_cast<uint8_t>(lane);
  t.wrote = m.phase;
  t.writer = after ? static_cast<uint16_t>(copy ? m.warps + w.index : w.index) : kMany;
  t.line = line;
}

void read_until(Warp& w, uint32_t address, uint32_t phase) {
  const unsigned granule = w.program->granule[0];
  for (uint32_t a = address / granule; a <= (address + 15) / granule; ++a)
    last_of(*w.memory, w.index, a).read = phase;
}

// One number stands for all reads here, and for all writes of several warps: where it is too late
// for some of them this sees a race that there is not.
void touch_global(Warp& w, Touch& t, Access access, uint32_t line, bool same, unsigned lane) {
  const Memory& m = *w.memory;
  const uint32_t first = m.launch_first, self = 1u << w.index;
  const auto fault = [&](const char* what) {
    throw Fault(what + (", written at " + w.program->where(t.line)));
  };
  note_lanes(w, lane);
  bool after = true;
  if (t.wrote >= first) {
    const bool atomics = access == Access::atomic && t.atomic;  // which have an order of their own
    const bool many = t.writer == kMany;
    after = after_all(w, t.wrote, many ? kAll : 1u << t.writer) && !(many && t.wrote >= w.met);
    const bool near = t.wrote >= m.block_first;
    if (!after && !atomics && !(near && same)) fault("races with a write");
    if (near && t.writer == w.index && other_lane(w, t.wrote, t.wrote_lane, lane) && !same &&
        !atomics)
      fault("races with a write of another lane");
  }
  if (access == Access::read) {
    if (t.read < m.block_first) {
      if (t.read >= first && !w.comes_after(t.read, t.readers)) t.before = t.read;
      t.readers = 0;
    }
    const bool alone = (t.readers & ~self) == 0;
    if (!alone || (t.readers && other_lane(w, t.read, t.read_lane, lane)))
      t.read_lane = kSeveral;
    else
      t.read_lane = static_cast<uint8_t>(lane);
    t.read = m.phase;
    t.readers |= self;
    return;
  }
  if (t.read >= first && !after_all(w, t.read, t.readers))
    throw Fault("writes what another warp or block may still read");
  if (t.readers & self && other_lane(w, t.read, t.read_lane, lane))
    throw Fault("writes what another lane may still read");
  if (t.before >= first && t.before < m.block_first && !w.comes_after(t.before, kAll))
    throw Fault("writes what another block may still read");
  t.wrote = m.phase;
  t.atomic = access == Access::atomic;
  t.writer = after ? static_cast<uint16_t>(w.index) : kMany;
  t.wrote_lane = static_cast<uint8_t>(lane);
  t.line = line;
}

}  // namespace ptx
