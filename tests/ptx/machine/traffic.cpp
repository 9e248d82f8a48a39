// What accesses cost: sectors of 32 bytes of global memory, and the times that shared memory is
// busy, whose 32 banks give a word of 4 bytes each at once.
#include <algorithm>

#include "machine.h"

namespace ptx {
namespace {

// The places that lanes touch, in units of `unit` bytes, each once.
std::vector<uint64_t> units(const uint64_t* addresses, uint32_t on, unsigned bytes, unsigned unit) {
  std::vector<uint64_t> found;
  for (unsigned l = 0; l < kLanes; ++l)
    if (on >> l & 1)
      for (uint64_t at = addresses[l] / unit; at <= (addresses[l] + bytes - 1) / unit; ++at)
        found.push_back(at);
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

}  // namespace

void Traffic::global(const uint64_t* addresses, uint32_t on, unsigned bytes) {
  global_bytes += static_cast<uint64_t>(std::popcount(on)) * bytes;
  global_sectors += units(addresses, on, bytes, 32).size();
}

// As many lanes at once as move 128 bytes.
void Traffic::shared(const uint64_t* addresses, uint32_t on, unsigned bytes) {
  const unsigned at_once = bytes <= 4 ? 32 : 128 / bytes;
  for (unsigned first = 0; first < kLanes; first += at_once) {
    const uint32_t group = on & static_cast<uint32_t>(((uint64_t{1} << at_once) - 1) << first);
    unsigned words[32] = {}, most = 0;
    for (uint64_t word : units(addresses, group, bytes, 4))
      most = std::max(most, ++words[word % 32]);
    shared_waves += most;
    shared_least += group != 0;
  }
}

}  // namespace ptx
