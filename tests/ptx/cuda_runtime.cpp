// What csrc/cuda's objects, as nvcc makes them, ask of CUDA's runtime: a kernel that is launched
// goes to a function that the tests have set. And where CPU tensors lie, so that a kernel may touch
// those that its parameters point into and nothing else.
#include <c10/core/CPUAllocator.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace {

struct Kernel {
  const char* name;
  int shared = 48 << 10;  // bytes that a launch may ask for
};

// 0, or the launch failed and the tests have called cuda_says.
using Launched = int (*)(const char* kernel, const unsigned* grid, unsigned threads, size_t shared,
                         void** arguments);

struct State {
  std::map<const void*, Kernel> kernels;  // by their functions on the host
  Launched launched = nullptr;
  int multiprocessors = 2;
  std::string error;
};

State& state() {  // objects register themselves before this file's own variables are there
  static State all;
  return all;
}

cudaError_t failed(const char* what) {
  state().error = what;
  return cudaErrorLaunchFailure;
}

// torch's memory for CPU tensors: where each piece begins and how long it is.
class Watched final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &give_back, c10::Device(c10::DeviceType::CPU)};
    void* place = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    std::memset(place, 0xff, bytes);  // NaN
    const std::lock_guard<std::mutex> lock(mutex());
    pieces()[reinterpret_cast<uint64_t>(place)] = bytes;
    return {place, place, &give_back, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }

  static bool find(uint64_t address, uint64_t* range) {
    const std::lock_guard<std::mutex> lock(mutex());
    auto next = pieces().upper_bound(address);
    if (next == pieces().begin()) return false;
    --next;
    range[0] = next->first;
    range[1] = next->first + next->second;
    return address < range[1];
  }

 private:
  static std::map<uint64_t, size_t>& pieces() {
    static auto* all = new std::map<uint64_t, size_t>;  // tensors may outlive this library's end
    return *all;
  }
  static std::mutex& mutex() {
    static auto* one = new std::mutex;
    return *one;
  }
  static void give_back(void* place) {
    if (place == nullptr) return;
    {
      const std::lock_guard<std::mutex> lock(mutex());
      pieces().erase(reinterpret_cast<uint64_t>(place));
    }
    std::free(place);
  }
};

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void cuda_begin(Launched launched, int multiprocessors) {
  static auto* allocator = new Watched;
  c10::SetCPUAllocator(allocator, 1);
  state().launched = launched;
  state().multiprocessors = multiprocessors;
}

EXPORT void cuda_says(const char* error) { state().error = error; }

// Whether a tensor's memory is there, and from where to where.
EXPORT int cuda_memory(uint64_t address, uint64_t* range) { return Watched::find(address, range); }

extern "C" {

void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}

void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
  state().kernels[host] = Kernel{name};
}

// Of calls by <<< >>>, which csrc/cuda does not make.
unsigned __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { std::abort(); }
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { std::abort(); }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  std::abort();
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute what, int value) {
  if (what != cudaFuncAttributeMaxDynamicSharedMemorySize || value > 227 << 10)
    return failed("an attribute that a GPU refuses");
  state().kernels.at(function).shared = value;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 1 << 20;  // an index whose number of multiprocessors is not kept: tests change it
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = state().multiprocessors;
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t) { return state().error.c_str(); }

cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t) {
  std::memset(address, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void* function,
                                void** arguments) {
  const Kernel& kernel = state().kernels.at(function);
  const unsigned grid[] = {how->gridDim.x, how->gridDim.y, how->gridDim.z};
  const unsigned threads = how->blockDim.x;
  if (how->blockDim.y != 1 || how->blockDim.z != 1 || how->numAttrs != 0)
    return failed("a launch of a kind that the tests do not know");
  if (how->dynamicSmemBytes > static_cast<size_t>(kernel.shared) || threads > 1024 || !grid[0])
    return failed("a launch beyond CUDA's limits");
  return state().launched(kernel.name, grid, threads, how->dynamicSmemBytes, arguments)
             ? cudaErrorLaunchFailure
             : cudaSuccess;
}

}  // extern "C"
