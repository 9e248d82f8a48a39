// Where lanes that a branch parts come together again: at the next instruction that all of its ways
// lead to.
#include <algorithm>

#include "machine.h"

namespace ptx {
namespace {

// The places that an instruction may lead to; one past the last is the end.
std::vector<uint32_t> ways(const Program& program, uint32_t at) {
  const Instruction& i = program.code[at];
  const bool guarded = i.guard != kNowhere;
  const auto end = static_cast<uint32_t>(program.code.size());
  std::vector<uint32_t> found;
  if (i.kind == Kind::branch) found.push_back(static_cast<uint32_t>(i.number));
  if (i.kind == Kind::exit) found.push_back(end);
  if ((i.kind != Kind::branch && i.kind != Kind::exit) || guarded) found.push_back(at + 1);
  return found;
}

struct Flow {
  std::vector<uint32_t> starts;              // of the pieces of code without branches, and the end
  std::vector<std::vector<uint32_t>> leads;  // of each, to pieces
  std::vector<uint32_t> next;                // of each, the nearest piece that all its ways lead to
  std::vector<uint32_t> order;               // of each, when a search from the end leaves it

  explicit Flow(const Program& program) {
    const auto end = static_cast<uint32_t>(program.code.size());
    starts = {0, end};
    for (uint32_t at = 0; at < end; ++at) {
      if (program.code[at].kind != Kind::branch && program.code[at].kind != Kind::exit) continue;
      for (uint32_t way : ways(program, at)) starts.push_back(way);
      if (at + 1 < end) starts.push_back(at + 1);
    }
    std::sort(starts.begin(), starts.end());
    starts.erase(std::unique(starts.begin(), starts.end()), starts.end());
    leads.resize(starts.size());
    for (uint32_t piece = 0; piece + 1 < starts.size(); ++piece)
      for (uint32_t way : ways(program, starts[piece + 1] - 1))
        leads[piece].push_back(piece_at(way));
    number();
    settle();
  }

  uint32_t piece_at(uint32_t at) const {
    return static_cast<uint32_t>(std::upper_bound(starts.begin(), starts.end(), at) -
                                 starts.begin()) -
           1;
  }

  void number() {
    std::vector<std::vector<uint32_t>> from(starts.size());
    for (uint32_t piece = 0; piece < leads.size(); ++piece)
      for (uint32_t way : leads[piece]) from[way].push_back(piece);
    order.assign(starts.size(), kNowhere);
    std::vector<bool> seen(starts.size());
    std::vector<std::pair<uint32_t, size_t>> path{{static_cast<uint32_t>(starts.size()) - 1, 0}};
    seen[path[0].first] = true;
    for (uint32_t left = 0; !path.empty();) {
      auto& [piece, way] = path.back();
      if (way == from[piece].size()) {
        order[piece] = left++;
        path.pop_back();
      } else {
        const uint32_t before = from[piece][way++];
        if (!seen[before]) path.emplace_back(before, 0);
        seen[before] = true;
      }
    }
  }

  uint32_t both(uint32_t a, uint32_t b) const {
    while (a != b) {
      while (order[a] < order[b]) a = next[a];
      while (order[b] < order[a]) b = next[b];
    }
    return a;
  }

  // Cooper, Harvey, Kennedy 2001, from the end of the code to its beginning.
  void settle() {
    const auto last = static_cast<uint32_t>(starts.size()) - 1;
    next.assign(starts.size(), kNowhere);
    next[last] = last;
    std::vector<uint32_t> pieces;
    for (uint32_t piece = 0; piece < last; ++piece)
      if (order[piece] != kNowhere) pieces.push_back(piece);
    std::sort(pieces.begin(), pieces.end(),
              [&](uint32_t a, uint32_t b) { return order[a] > order[b]; });
    for (bool changed = true; changed;) {
      changed = false;
      for (uint32_t piece : pieces) {
        uint32_t found = kNowhere;
        for (uint32_t way : leads[piece])
          if (next[way] != kNowhere) found = found == kNowhere ? way : both(found, way);
        changed = changed || next[piece] != found;
        next[piece] = found;
      }
    }
  }
};

}  // namespace

void find_meetings(Program& program) {
  const Flow flow(program);
  for (uint32_t at = 0; at < program.code.size(); ++at) {
    Instruction& i = program.code[at];
    if (i.kind != Kind::branch || i.guard == kNowhere) continue;
    const uint32_t piece = flow.next[flow.piece_at(at)];
    if (piece == kNowhere) throw Fault("a branch that never leads to the end");
    i.o[0] = flow.starts[piece];
  }
}

}  // namespace ptx
