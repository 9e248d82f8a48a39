// A stack that is left and gone back to: a thread of simt.cpp.
//
// On x86-64 a switch saves what a function call has to keep, in nanoseconds. Elsewhere it is
// swapcontext, which also asks the system for the signals' mask; a warp's instruction switches 64
// times.
#pragma once
#include <sys/mman.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdlib>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

namespace simt {

constexpr size_t kStack = 256 << 10;  // taken up only as far as it is used

inline char* new_stack() {
  void* memory = mmap(nullptr, kStack, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  return static_cast<char*>(memory);
}

#ifdef __x86_64__
// Saves the running stack's top in *from and goes on where `to` was left.
extern "C" void simt_switch(void** from, void* to);
asm(".text\n.p2align 4\n.local simt_switch\n.type simt_switch, @function\nsimt_switch:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n  ret\n"
    ".size simt_switch, .-simt_switch\n");

struct Context {
  void* top = nullptr;
};

inline void begin_at(Context& context, char* stack, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack + kStack) - 2;  // aligned as after a call
  top[0] = reinterpret_cast<void*>(entry);
  context.top = top - 6;
}

inline void leave_for(Context& from, Context& to) { simt_switch(&from.top, to.top); }
#else
struct Context {
  ucontext_t saved;
};

inline void begin_at(Context& context, char* stack, void (*entry)()) {
  getcontext(&context.saved);
  context.saved.uc_stack = {stack, 0, kStack};
  context.saved.uc_link = nullptr;
  makecontext(&context.saved, entry, 0);
}

inline void leave_for(Context& from, Context& to) { swapcontext(&from.saved, &to.saved); }
#endif

}  // namespace simt
