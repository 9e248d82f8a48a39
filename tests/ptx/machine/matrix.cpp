// Matrix units: mma.sync and wgmma.
//
// Products are exact. Of a chunk of them and what they are added to, a unit shifts all to the
// largest exponent, cuts off what falls below a few bits under float32's last, adds, and cuts the
// sum to float32: chunks of 8 products of 16 bits with one such bit before sm_90, of 16 with two
// since (of tf32 half as many), after Khattak and Mikaitis 2025, arXiv:2512.07004, and Fasi et al.
// 2021, doi:10.7717/peerj-cs.330.
#include <algorithm>

#include "types.h"

namespace ptx {
namespace {

enum class Type : uint8_t { bf16, f16, tf32, s8, u8 };

unsigned bytes_of(Type type) {
  return type == Type::tf32 ? 4 : type == Type::s8 || type == Type::u8 ? 1 : 2;
}

float element(const char* bytes, unsigned index, Type type) {
  uint32_t value = 0;
  std::memcpy(&value, bytes + index * bytes_of(type), bytes_of(type));
  if (type == Type::bf16) return bfloat_to_float(static_cast<uint16_t>(value));
  if (type == Type::f16) return half_to_float(static_cast<uint16_t>(value));
  if (type == Type::tf32) return std::bit_cast<float>(value & 0xffffe000u);
  return type == Type::s8 ? static_cast<float>(static_cast<int8_t>(value))
                          : static_cast<float>(value);
}

// Doubles of finite floats' products and sums are finite and normal: their bits tell the exponent.
constexpr int kBias = 1023;

double power_of_two(int exponent) {
  return std::bit_cast<double>(static_cast<uint64_t>(kBias + exponent) << 52);
}

template <unsigned kCount>
float truncated_sum(const double* terms, float start, int bits) {
  constexpr uint64_t kMagnitude = ~uint64_t{0} >> 1;
  auto largest = static_cast<int64_t>(std::bit_cast<uint64_t>(double{start}) & kMagnitude);
  for (unsigned n = 0; n < kCount; ++n)
    largest =
        std::max(largest, static_cast<int64_t>(std::bit_cast<uint64_t>(terms[n]) & kMagnitude));
  const int exponent = static_cast<int>(largest >> 52) - kBias;
  if (largest == 0 || exponent > kBias) {  // zeros; an infinity or NaN
    double plain = start;
    for (unsigned n = 0; n < kCount; ++n) plain += terms[n];
    return static_cast<float>(plain);
  }
  const int last = exponent - 23 - bits;
  const double up = power_of_two(-last);
  int64_t sum = static_cast<int64_t>(start * up);
  for (unsigned n = 0; n < kCount; ++n) sum += static_cast<int64_t>(terms[n] * up);
  return toward_zero(static_cast<double>(sum) * power_of_two(last));
}

// sums[c] += a . b[c], over k elements.
template <unsigned kChunk>
void add_chunks(const float* a, const float (*b)[64], unsigned k, float* sums, unsigned columns,
                int bits) {
  for (unsigned c = 0; c < columns; ++c)
    for (unsigned first = 0; first < k; first += kChunk) {
      double terms[kChunk];
      for (unsigned n = 0; n < kChunk; ++n)
        terms[n] = static_cast<double>(a[first + n]) * b[c][first + n];
      sums[c] = truncated_sum<kChunk>(terms, sums[c], bits);
    }
}

void add_floats(const float* a, const float (*b)[64], unsigned k, float* sums, unsigned columns,
                Type type, bool hopper) {
  const unsigned chunk = std::min(k, (type == Type::tf32 ? 4u : 8u) << hopper);
  const auto add = chunk == 4 ? add_chunks<4> : chunk == 8 ? add_chunks<8> : add_chunks<16>;
  if (k % chunk) throw Fault("a matrix unit's product of " + std::to_string(k) + " elements");
  add(a, b, k, sums, columns, 1 + hopper);
}

void add_integers(const float* a, const float (*b)[64], unsigned k, int32_t* sums,
                  unsigned columns) {
  for (unsigned c = 0; c < columns; ++c) {
    int64_t sum = sums[c];
    for (unsigned n = 0; n < k; ++n)
      sum += static_cast<int64_t>(a[n]) * static_cast<int64_t>(b[c][n]);
    sums[c] = static_cast<int32_t>(sum);
  }
}

// 16 rows of A (k elements each), `columns` columns of B, and the registers of D of one warp: lane
// l has of row l / 4 (+ 8) columns 8 j + l % 4 * 2 (+ 1), in registers 4 j, 4 j + 1 (4 j + 2, 4 j +
// 3).
void multiply(Warp& w, const Instruction& i, Type type, unsigned k, unsigned columns,
              const float (*a)[64], const float (*b)[64], bool keep) {
  const bool whole = type == Type::s8 || type == Type::u8;
  const std::vector<uint32_t>&from = i.more, &to = i.list;
  for (unsigned row = 0; row < 16; ++row) {
    uint32_t sums[256];
    const auto each = [&](auto work) {
      for (unsigned c = 0; c < columns; ++c) {
        const unsigned lane = row % 8 * 4 + c % 8 / 2, number = c / 8 * 4 + row / 8 * 2 + c % 2;
        work(c, lane, number);
      }
    };
    each([&](unsigned c, unsigned lane, unsigned number) {
      sums[c] = keep ? w.lane_values<uint32_t>(from[number])[lane] : 0;
    });
    if (whole)
      add_integers(a[row], b, k, reinterpret_cast<int32_t*>(sums), columns);
    else
      add_floats(a[row], b, k, reinterpret_cast<float*>(sums), columns, type, w.program->hopper);
    each([&](unsigned c, unsigned lane, unsigned number) {
      w.lane_values<uint32_t>(to[number])[lane] = sums[c];
    });
  }
}

// A of a warp in registers: 16 rows of 32 bytes (of 16 in two registers). Register n of lane l has
// 4 bytes of row l / 4 + 8 (n % 2), at bytes 4 (l % 4) + 16 (n / 2).
void rows_of_registers(Warp& w, const uint32_t* places, unsigned count, Type type,
                       float (*rows)[64]) {
  const unsigned per = 4 / bytes_of(type);
  for (unsigned n = 0; n < count; ++n)
    for (unsigned l = 0; l < kLanes; ++l) {
      const uint32_t word = w.lane_values<uint32_t>(places[n])[l];
      for (unsigned e = 0; e < per; ++e)
        rows[l / 4 + 8 * (n % 2)][l % 4 * per + 4 * per * (n / 2) + e] =
            element(reinterpret_cast<const char*>(&word), e, type);
    }
}

// mma.sync.m16n8kK. list: D, A, B; more: C.
void multiply_registers(Warp& w, const Instruction& i) {
  w.together("mma");
  const Type type = static_cast<Type>(i.width);
  const unsigned k = i.to, count_a = k * bytes_of(type) / 8, count_b = count_a / 2,
                 per = 4 / bytes_of(type);
  static thread_local float a[16][64], b[256][64];
  const uint32_t* operands = i.list.data() + 4;
  rows_of_registers(w, operands, count_a, type, a);
  for (unsigned n = 0; n < count_b; ++n)  // as A, of 8 columns
    for (unsigned l = 0; l < kLanes; ++l) {
      const uint32_t word = w.lane_values<uint32_t>(operands[count_a + n])[l];
      for (unsigned e = 0; e < per; ++e)
        b[l / 4][l % 4 * per + 4 * per * n + e] =
            element(reinterpret_cast<const char*>(&word), e, type);
    }
  multiply(w, i, type, k, 8, a, b, true);
}

// What a descriptor of wgmma says: where 16 bytes of a row (or, transposed, of a column) lie.
struct Described {
  uint32_t start, leading, stride;
  unsigned swizzle;  // bytes of a row that are mixed: 128, 64, 32, or 16: none are

  explicit Described(uint64_t bits)
      : start(static_cast<uint32_t>(bits & 0x3fff) << 4),
        leading(static_cast<uint32_t>(bits >> 16 & 0x3fff) << 4),
        stride(static_cast<uint32_t>(bits >> 32 & 0x3fff) << 4),
        swizzle(16u << (4 - (bits >> 62)) % 4) {
    if (bits >> 49 & 7) throw Fault("a descriptor with a base offset");
  }

  // Rows one below another, each of `swizzle` bytes; 8 rows, `stride` bytes to the next 8.
  uint32_t along_k(unsigned row, unsigned piece) const {
    const uint32_t across = swizzle == 16 ? piece * leading : piece * 16;
    return mixed(start + row / 8 * stride + row % 8 * swizzle + across);
  }
  // 8 steps of k one below another, each of `swizzle` bytes of neighbouring rows.
  uint32_t along_rows(unsigned k, unsigned piece) const {
    if (swizzle == 16) return start + piece * stride + k / 8 * leading + k % 8 * 16;
    const unsigned pieces = swizzle / 16;
    return mixed(start + piece / pieces * leading + piece % pieces * 16 + k / 8 * stride +
                 k % 8 * swizzle);
  }

  // The bits of an address above the lowest 7 are added, without carries, to those of the piece of
  // 16 bytes.
  uint32_t mixed(uint32_t address) const {
    return address ^ (address >> 3 & (swizzle / 16 - 1) << 4);
  }
};

uint64_t checksum(const Memory& m, const std::vector<uint32_t>& pieces) {
  uint64_t sum = 1469598103934665603u;
  for (uint32_t piece : pieces)
    for (unsigned half = 0; half < 2; ++half) {
      uint64_t word = 0;
      std::memcpy(&word, m.shared.data() + piece + 8 * half, 8);
      sum = (sum ^ word) * 1099511628211u;
    }
  return sum;
}

void read_described(Warp& w, const Described& where, bool transposed, unsigned first, unsigned rows,
                    unsigned k, Type type, float (*to)[64], Reading& reading, uint32_t line) {
  const unsigned each = 16 / bytes_of(type);  // elements of a piece
  const unsigned outer = transposed ? k : rows, pieces = (transposed ? rows : k) / each;
  for (unsigned o = 0; o < outer; ++o)
    for (unsigned piece = 0; piece < pieces; ++piece) {
      const uint32_t address =
          transposed ? where.along_rows(o, first / each + piece) : where.along_k(first + o, piece);
      const char* bytes = shared_at(w, kSeveral, address, 16, Access::read, line, true);
      reading.pieces.push_back(address);
      for (unsigned e = 0; e < each; ++e)
        (transposed ? to[piece * each + e][o] : to[o][piece * each + e]) = element(bytes, e, type);
    }
}

// wgmma: this warp's 16 of 64 rows. list: D; more: D, and A where it lies in registers; o:
// descriptors of A (or nowhere) and B, and whether to add to D.
void multiply_shared(Warp& w, const Instruction& i) {
  w.together("wgmma");
  const Type type = static_cast<Type>(i.width);
  const unsigned k = i.to, columns = static_cast<unsigned>(i.list.size()) * 2;
  const bool transposed_a = i.number & 1, transposed_b = i.number & 2;
  static thread_local float a[16][64], b[256][64];
  Reading reading{{}, 0, w.product_group, i.line};
  if (i.o[0] == kNowhere)
    rows_of_registers(w, i.more.data() + i.list.size(), 4, type, a);
  else
    read_described(w, Described(w.lane_values<uint64_t>(i.o[0])[0]), transposed_a, w.index % 4 * 16,
                   16, k, type, a, reading, i.line);
  read_described(w, Described(w.lane_values<uint64_t>(i.o[1])[0]), transposed_b, 0, columns, k,
                 type, b, reading, i.line);
  reading.sum = checksum(*w.memory, reading.pieces);
  w.readings.push_back(std::move(reading));
  multiply(w, i, type, k, columns, a, b, w.predicate(i.o[2]) != 0);
}

void commit_products(Warp& w, const Instruction&) { ++w.product_group; }

// What products have read until now must be as it was, and counts as read now.
void wait_for_products(Warp& w, const Instruction& i) {
  std::erase_if(w.readings, [&](const Reading& reading) {
    if (reading.group >= w.product_group - static_cast<int>(i.number)) return false;
    if (checksum(*w.memory, reading.pieces) != reading.sum)
      throw Fault("written while a product still read it, which was begun at " +
                  w.program->where(reading.line));
    for (uint32_t piece : reading.pieces)
      if (w.memory->parted)
        read_until(w, piece, w.memory->phase);
      else
        shared_at(w, kSeveral, piece, 16, Access::read, reading.line);
    return true;
  });
  if (!w.memory->parted) return;
  for (const Reading& left : w.readings)  // may read the same pieces
    for (uint32_t piece : left.pieces) read_until(w, piece, kForever);
}

Type type_of(const std::string& name) {
  if (name == "bf16") return Type::bf16;
  if (name == "f16") return Type::f16;
  if (name == "tf32") return Type::tf32;
  if (name == "s8") return Type::s8;
  if (name == "u8") return Type::u8;
  throw Fault("no operand of a matrix unit: " + name);
}

// mma.sync.aligned.m16n8k16.row.col[.satfinite].f32.bf16.bf16.f32 D, A, B, C
bool decode_mma(const Statement& from, Names& names, Instruction& made) {
  if (!from.has("aligned") || from.parts.at(3).rfind("m16n8k", 0) != 0 || !from.has("row") ||
      !from.has("col"))
    return false;
  const size_t last = from.parts.size() - 1;
  const Type type = type_of(from.parts[last - 1]);
  if (from.parts[last - 2] != from.parts[last - 1] ||
      (from.parts[last] != "f32" && from.parts[last] != "s32"))
    return false;
  made.width = static_cast<uint8_t>(type);
  made.to = static_cast<uint8_t>(std::stoi(from.parts[3].substr(6)));
  for (size_t n : {0, 1, 2})
    for (const std::string& one : names.vector(from.operands.at(n)))
      made.list.push_back(names.place(one, 4));
  for (const std::string& one : names.vector(from.operands.at(3)))
    made.more.push_back(names.place(one, 4));
  made.run = multiply_registers;
  return made.list.size() == 4u + made.to * bytes_of(type) / 8 * 3 / 2;
}

// wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 D, A, B, scale-d[, -a, -b[, trans-a],
// trans-b]
bool decode_wgmma(const Statement& from, Names& names, Instruction& made) {
  if (from.parts.at(1) == "fence") {
    made.run = [](Warp&, const Instruction&) {};
  } else if (from.parts.at(1) == "commit_group") {
    made.run = commit_products;
  } else if (from.parts.at(1) == "wait_group") {
    made.number = std::stoi(from.operands.at(0));
    made.run = wait_for_products;
  } else {
    const std::string& shape = from.parts.at(4);
    const Type type = type_of(from.parts.back());
    if (from.parts[from.parts.size() - 2] != from.parts.back()) return false;
    made.width = static_cast<uint8_t>(type);
    made.to = static_cast<uint8_t>(std::stoi(shape.substr(shape.find('k') + 1)));
    for (const std::string& one : names.vector(from.operands.at(0)))
      made.list.push_back(names.place(one, 4));
    made.more = made.list;
    const std::string& a = from.operands.at(1);
    if (a[0] == '{')
      for (const std::string& one : names.vector(a)) made.more.push_back(names.place(one, 4));
    else
      made.o[0] = names.place(a, 8);
    made.o[1] = names.place(from.operands.at(2), 8);
    made.o[2] = names.predicate(from.operands.at(3));
    for (size_t n : {4, 5})
      if (from.operands.size() > n && from.operands[n] != "1") return false;
    if (bytes_of(type) == 2) {
      if (a[0] != '{' && from.operands.at(6) == "1") made.number |= 1;
      if (from.operands.back() == "1") made.number |= 2;
    }
    made.run = multiply_shared;
    return made.list.size() * 2 == std::stoul(shape.substr(shape.find('n') + 1));
  }
  return true;
}

}  // namespace

bool decode_matrix(const Statement& from, Names& names, Instruction& made) {
  if (from.parts[0] == "mma" && from.parts.at(1) == "sync") return decode_mma(from, names, made);
  return from.parts[0] == "wgmma" && decode_wgmma(from, names, made);
}

}  // namespace ptx
