// A machine that runs PTX, the code that Triton and nvcc hand to NVIDIA's assembler, on a CPU.
//
// A warp runs an instruction for its 32 lanes at once. Lanes that branch apart go one way after the
// other, and together again from where all ways lead (flow.cpp). The warps of a block run one after
// the other from barrier to barrier, blocks one after the other in random order: what a GPU would
// run at the same time cannot go wrong by chance, so memory watches who touches what instead
// (memory.cpp). Arithmetic is as exact as the PTX manual promises and no more (floats.cpp,
// matrix.cpp).
#pragma once
#include <bit>
#include <compare>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace ptx {

constexpr unsigned kLanes = 32;
constexpr unsigned kSeveral = kLanes;  // in the place of a lane's number
constexpr uint32_t kAll = ~0u, kNowhere = ~0u;

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Warp;
struct Instruction;
using Run = void (*)(Warp&, const Instruction&);

enum class Kind : uint8_t { plain, branch, exit, barrier };

struct Instruction {
  Run run = nullptr;
  Kind kind = Kind::plain;
  bool unless = false;        // the guard has to be false
  uint8_t width = 0;          // bytes of an element in memory, of a conversion's source
  uint8_t to = 0;             // bytes of the register that it goes to or comes from
  bool sign = false;          // extended by it
  uint32_t guard = kNowhere;  // a predicate
  uint32_t o[5] = {kNowhere, kNowhere, kNowhere, kNowhere, kNowhere};  // places of operands
  std::vector<uint32_t> list, more;  // and of vectors of them: { } in the order of the text
  int64_t number = 0;                // an offset, a target, an immediate that is not a lane's value
  uint32_t line = 0;                 // of the source, file << 20 | line
};

struct Special {  // a register that the machine sets
  uint32_t place;
  std::string name;
};

struct Constant {
  uint32_t place;
  unsigned width;
  uint64_t value;
};

struct Program {
  std::string name;
  std::vector<Instruction> code;
  std::vector<Constant> constants;
  std::vector<Special> specials;
  uint32_t bytes = 0;                         // of a warp's registers
  uint32_t parameters = 0;                    // bytes of them: each begins at a multiple of 8
  unsigned threads = 0, most_threads = 1024;  // of a block; 0: not said
  unsigned granule[2] = {16, 16};             // fewest bytes of an access to shared, global memory
  bool hopper = false;                        // sums of matrix units as on sm_90
  std::map<int, std::string> files;

  std::string where(uint32_t line) const;
};

// What is known of a granule of memory; all zeros: nothing. A phase is the time from barrier to
// barrier of one block.
struct Touch {
  uint32_t wrote = 0, read = 0;  // phases of the last ones
  uint32_t readers = 0;          // warps that read in phase `read`
  uint32_t before = 0;           // global memory: phase of a read by a block before that of `read`
  uint32_t line = 0;             // that wrote
  uint16_t writer = 0;
  uint16_t flight = 0;  // 1 + the warp whose copy is under way
  uint32_t fence = 0;   // 1 + fences of the warp that stored it then; 0: no fence needed
  bool atomic = false;  // what wrote
  // lanes of the last write and read, or kSeveral, and the warp's steps then
  uint8_t wrote_lane = 0, read_lane = 0;
  uint32_t wrote_step = 0, read_step = 0;
};

struct Touches {  // zeros, of which the system brings those that are used
  std::unique_ptr<Touch[], decltype(&std::free)> held{nullptr, std::free};

  explicit Touches(size_t count)
      : held(static_cast<Touch*>(std::calloc(count, sizeof(Touch))), std::free) {}
  Touch& operator[](size_t index) { return held[index]; }
};

// Accesses of a launch that a warp comes after: those of the phases first to last - 1, of one warp
// or (kNowhere) of all of a block.
struct Past {
  uint32_t first, last, warp;
  auto operator<=>(const Past&) const = default;
};

struct Range {           // of global memory
  uint64_t first, last;  // and one past it
  Touches touches;
};

struct Copy {
  uint32_t target;
  const char* source;
  unsigned bytes, read;
  int group;
  uint32_t line;
  unsigned lane;
};

struct Reading {  // what a product under way reads: pieces of 16 bytes, and what they held
  std::vector<uint32_t> pieces;
  uint64_t sum;
  int group;
  uint32_t line;
};

// What the accesses of a launch cost, where it is asked for.
struct Traffic {
  // bytes that lanes asked for, and the sectors that hold them; times that shared memory was busy,
  // and would have been without two words of one bank; instructions of warps
  uint64_t global_bytes = 0, global_sectors = 0, shared_waves = 0, shared_least = 0, issued = 0;

  void global(const uint64_t* addresses, uint32_t on, unsigned bytes);  // of one instruction
  void shared(const uint64_t* addresses, uint32_t on, unsigned bytes);
};

struct Memory {
  const Program* program;
  std::vector<char> shared;
  Touches touches;  // of shared memory
  std::vector<Range> ranges;
  // of each warp: fences between proxies that it has run, and had when the phase began; phase of
  // the last one
  std::vector<uint32_t> fences{}, settled{}, fenced{};
  uint32_t phase = 0, block_first = 0, launch_first = 0;
  std::map<uint64_t, std::vector<Past>> told{};  // by atomics, at each address
  size_t found = 0;                              // the range of the last access
  Traffic* traffic = nullptr;                    // null: not counted
};

// Lanes that go on together, until they come to where they meet those that they were parted from.
struct Fragment {
  uint32_t pc, lanes, meeting;
};

struct Warp {
  const Program* program = nullptr;
  Memory* memory = nullptr;
  const char* parameters = nullptr;
  std::vector<char> registers;
  unsigned index = 0;
  uint32_t on = 0;              // lanes that run the instruction at hand
  std::vector<Fragment> apart;  // the last one runs
  bool waits = false, done = false;
  uint32_t step = 0;                       // times that its lanes have waited for one another
  uint32_t vote_to = kNowhere, votes = 0;  // of the barrier that it waits at
  std::vector<Copy> copies;
  int copy_group = 0;
  std::vector<Reading> readings;
  int product_group = 0;
  // Of other blocks: what it comes after, what atomics told it (of which it can be sure after the
  // next fence), what its own atomics tell (that was before its last fence).
  std::vector<Past> knows, heard, tells;

  template <class T>
  T* lane_values(uint32_t place) {
    return reinterpret_cast<T*>(registers.data() + place);
  }
  template <class F>
  void each(F work) {
    if (on == kAll) {
#pragma GCC ivdep
      for (unsigned l = 0; l < kLanes; ++l) work(l);
    } else {
      for (unsigned l = 0; l < kLanes; ++l)
        if (on >> l & 1) work(l);
    }
  }
  uint64_t get(uint32_t place, unsigned width, unsigned lane) const {
    uint64_t value = 0;
    std::memcpy(&value, registers.data() + place + width * lane, width);
    return value;
  }
  void put(uint32_t place, unsigned width, unsigned lane, uint64_t value) {
    std::memcpy(registers.data() + place + width * lane, &value, width);
  }
  uint32_t& predicate(uint32_t place) { return *lane_values<uint32_t>(place); }
  void set(uint32_t place, uint32_t bits) {
    if (place == kNowhere) return;  // the place of _
    uint32_t& old = predicate(place);
    old = (old & ~on) | (bits & on);
  }
  bool comes_after(uint32_t phase, uint32_t warps) const;  // what these did then, in another block
  void fence();                                            // membar.gl
  void together(const char* what) const {
    if (on != kAll) throw Fault(std::string(what) + " by a part of the warp's lanes");
  }
  void begin();
  void end();
  void branch(const Instruction& i);
  void go();  // until a barrier or the end
};

// The text of an instruction, taken apart.
struct Statement {
  std::string opcode;
  std::vector<std::string> parts, operands;  // of the opcode at its dots; at commas
  bool has(const char* part) const;
};

struct Register {  // or a bank of them
  uint32_t place;
  unsigned width, count;  // width 0: predicates
};

// While a program is read: where registers and constants lie.
struct Names {
  Program& program;
  std::map<std::string, Register> banks;  // "%r" -> where %r0 lies
  std::map<std::pair<uint64_t, unsigned>, uint32_t> constants;
  std::map<std::string, Register> specials;
  std::map<std::string, int> labels;
  std::map<std::string, uint32_t> symbols;  // parameters and shared memory -> where they begin
  std::vector<std::map<std::string, Register>> scopes{};  // single registers, of each brace

  Register reg(const std::string& name);                  // throws where there is none
  const Register* single(const std::string& name) const;  // of the nearest brace; null: none
  bool is_register(const std::string& operand) const;
  uint32_t place(const std::string& operand, unsigned width);  // a register's or a constant's
  uint32_t predicate(const std::string& operand);
  // [ %r1 + 4 ]: the place of an address of `width` bytes, and an offset
  void address(const std::string& operand, unsigned width, Instruction& made);
  std::vector<std::string> vector(const std::string& operand) const;  // { %r1, %r2 }
};

std::unique_ptr<Program> read(const std::string& text);
void find_meetings(Program& program);  // o[0] of each branch: where its lanes meet again

// Each of these makes an instruction of a statement, or returns false: not one of its own.
bool decode_integers(const Statement& from, Names& names, Instruction& made);
bool decode_comparison(const Statement& from, Names& names, Instruction& made);
bool decode_floats(const Statement& from, Names& names, Instruction& made);
bool decode_conversion(const Statement& from, Names& names, Instruction& made);
bool decode_exchange(const Statement& from, Names& names, Instruction& made);
bool decode_memory(const Statement& from, Names& names, Instruction& made);
bool decode_matrix(const Statement& from, Names& names, Instruction& made);

// Memory, watched: a pointer to where the bytes lie, or a Fault. value: what an ordinary store will
// write.
enum class Access { read, write, settle, atomic };  // settle: a copy arrives where it was begun
char* shared_at(Warp& warp, unsigned lane, uint32_t address, unsigned bytes, Access access,
                uint32_t line, bool asynchronous = false, const char* value = nullptr);
char* global_at(Warp& warp, unsigned lane, uint64_t address, unsigned bytes, Access access,
                uint32_t line, const char* value = nullptr);

unsigned width_of(const std::string& type);  // of "b32", "f16x2" ..., 0 for another word

}  // namespace ptx
