// A machine that runs PTX, the code that Triton and nvcc hand to NVIDIA's assembler, on a CPU.
//
// A warp runs an instruction for its 32 lanes at once. Lanes that branch apart go one way after the
// other, and together again from where all ways lead (flow.cpp). The warps of a block run one after
// the other from barrier to barrier, blocks one after the other in random order: what a GPU would
// run at the same time cannot go wrong by chance, so memory watches who touches what instead
// (memory.cpp). Where parts of a block meet by themselves (a program is `parted`), its warps run
// from meeting to meeting (meeting.cpp), and each has a clock of what it comes after (order.cpp).
// Arithmetic is as exact as the PTX manual promises and no more (floats.cpp, matrix.cpp).
#pragma once
#include <bit>
#include <compare>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace ptx {

constexpr unsigned kLanes = 32;
constexpr unsigned kSeveral = kLanes;  // in the place of a lane's number
constexpr uint32_t kAll = ~0u, kNowhere = ~0u, kForever = ~0u;
constexpr uint16_t kMany = 0xffff;  // in the place of a writer

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Warp;
struct Instruction;
using Run = void (*)(Warp&, const Instruction&);

enum class Kind : uint8_t { plain, branch, exit, barrier, meeting };  // meeting: of mbarriers

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
  bool parted = false;                        // has barriers of parts of a block, or mbarriers
  std::map<int, std::string> files;

  std::string where(uint32_t line) const;
};

// What is known of a granule of memory; all zeros: nothing. A phase is the time from barrier to
// barrier of one block; in a parted program, from one meeting of any warps to the next.
struct Touch {
  uint32_t wrote = 0, read = 0;  // phases of the last ones
  uint32_t readers = 0;          // warps that read in phase `read`
  uint32_t before = 0;           // global memory: phase of a read by a block before that of `read`
  uint32_t line = 0;             // that wrote
  uint16_t writer = 0;
  uint16_t flight = 0;   // 1 + the warp whose copy is under way
  uint32_t fence = 0;    // 1 + fences of the warp that stored it then; 0: no fence needed
  bool atomic = false;   // what wrote
  bool barrier = false;  // part of an mbarrier
  // lanes of the last write and read, or kSeveral, and the warp's steps then
  uint8_t wrote_lane = 0, read_lane = 0;
  uint32_t wrote_step = 0, read_step = 0;
};

// What one warp of a parted program last did to a granule of shared memory: phases.
struct Last {
  uint32_t wrote, copied, read;  // kForever: a product under way reads it
  uint8_t wrote_lane, read_lane;
};

template <class T>
struct Zeros {  // of which the system brings those that are used
  std::unique_ptr<T[], decltype(&std::free)> held{nullptr, std::free};

  explicit Zeros(size_t count) : held(static_cast<T*>(std::calloc(count, sizeof(T))), std::free) {}
  T& operator[](size_t index) { return held[index]; }
};
using Touches = Zeros<Touch>;

// What a warp of a parted program comes after, three numbers of each warp v of its block: accesses
// of v in phases below the first, copies that v began in phases below the second (at warps + v),
// and (at 2 warps + v) of its stores, those that a fence has made visible to matrix units.
using Clock = std::vector<uint32_t>;

struct Mbarrier {
  uint32_t count, pending, parity;  // of the phase that is not complete
  Clock gathers, told;              // of those that came to this phase, and to the one before
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
  uint32_t when;  // it began
};

struct Bundle {  // copies of a warp's lanes, which arrive at mbarriers when they are complete
  Warp* warp;
  uint32_t lanes, when, line;
  std::vector<uint32_t> at;  // mbarriers, of each of the lanes
  Clock clock;
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
  // of a parted program:
  bool parted = false;
  size_t granules = 0;
  unsigned warps = 0;
  Zeros<Last> last{0};  // warps x granules
  std::map<uint32_t, Mbarrier> mbarriers{};
  std::vector<Bundle> bundles{};
  std::mt19937_64* die = nullptr;
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
  const Instruction* held = nullptr;  // waits at it
  // of a parted program: the mbarrier that it waits for, the phase since its lanes last waited for
  // one another, which of them touched memory since, the phases of its groups of copies
  uint32_t mbarrier = 0, parity = 0, met = 0, touched = 0;
  Clock clock;
  std::vector<uint32_t> commits;

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
  void lanes_meet() {
    ++step;
    if (!memory->parted) return;
    met = ++memory->phase;
    touched = 0;
  }
  // All of the warp's accesses in phases below are before what the lanes that are on do now.
  uint32_t own() const { return touched & ~on ? met : memory->phase + 1; }
  void begin();
  void end();
  void branch(const Instruction& i);
  void work(const Instruction& i);
  void go();  // until a barrier or the end, or where another warp is to run
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
  std::map<std::string, uint32_t> symbols;  // parameters and shared memory -> where they begin
  // of each brace: single registers, and places in the code
  std::vector<std::map<std::string, Register>> scopes{};
  std::vector<std::map<std::string, int>> labels{};

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
bool decode_meeting(const Statement& from, Names& names, Instruction& made);

void meet(const std::vector<Warp*>& warps);                        // at a barrier
void run_parted(const std::vector<Warp*>& warps, Memory& memory);  // one block

// Memory, watched: a pointer to where the bytes lie, or a Fault. value: what an ordinary store will
// write.
enum class Access { read, write, copy, settle, atomic };  // settle: a copy arrives where it began
char* shared_at(Warp& warp, unsigned lane, uint32_t address, unsigned bytes, Access access,
                uint32_t line, bool asynchronous = false, const char* value = nullptr);
char* global_at(Warp& warp, unsigned lane, uint64_t address, unsigned bytes, Access access,
                uint32_t line, const char* value = nullptr);

// The same of a granule, in a parted program.
void touch_shared(Warp& warp, uint32_t granule, Access access, uint32_t line, bool asynchronous,
                  bool same, unsigned lane);
void touch_global(Warp& warp, Touch& touch, Access access, uint32_t line, bool same, unsigned lane);
// A product reads 16 bytes until this phase.
void read_until(Warp& warp, uint32_t address, uint32_t phase);
std::string hexadecimal(uint64_t value);

unsigned width_of(const std::string& type);  // of "b32", "f16x2" ..., 0 for another word

}  // namespace ptx
