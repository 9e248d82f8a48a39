// dk and dv of attention, A.5 and A.9: the largest launch of attention_bwd (attention_bwd.cu).
// Owns:    a block = up to 64 keys of one key head, 16 a warp, which stay in shared memory. Tiles
//          of queries pass, head after head of the group: every sum has a fixed order, and no two
//          blocks add to one number.
// Method:  scores are made again as (keys, queries), so that weights and dx are, as they lie, left
//          factors. Heads wider than 128 take two launches, since dk and dv do not fit into the
//          registers together.
// Traffic: reads k and v once, q, dout and the rows' numbers once for each tile of keys that sees
//          them; writes dk and dv.
// Config:  KeysShape below; timed on an H200: 1.3 to 3 times Triton's.
// Source:  own work, after Dao 2023, arXiv:2307.08691, algorithm 2.
#include "attention_bwd.h"

#ifdef TFM_KERNEL_HALF
#include "attention_bwd_tile.cuh"

namespace tfm_kernels {
namespace {

enum class Part { both, dk, dv };

template <int item_size, int width>
struct KeysShape {
  static constexpr bool kWide = width == 256;
  static constexpr int kWarps = kWide && item_size == 4 ? 2 : 4;
  static constexpr int kN = item_size == 4 ? 2 : 4;                      // fragments of 8 queries
  static constexpr int kStages = width == 64 && item_size == 2 ? 2 : 1;  // of tiles of queries
  static constexpr int kKeys = kWarps * 16, kRows = kN * 8;
};

// A tile of queries of one of the group's heads.
struct Stop {
  int member, m0;
};

// The tiles of queries that see a tile of keys, head after head of a group.
template <int rows, int keys>
struct QueryTiles {
  const Attention& call;
  const Sequence& s;
  int64_t b, first_head;
  int n0;
  Met met;

  __device__ bool ended(const Stop& stop) const { return stop.member >= call.group; }
  __device__ int64_t head_of(const Stop& stop) const { return first_head + stop.member; }
  // The first one from `stop` on that shows something, or the end. All threads call.
  __device__ Stop settled(Stop stop) const {
    while (!ended(stop)) {
      if (met.first(rows) >= met.end) return {call.group, 0};
      if (stop.m0 >= met.end)
        stop = {stop.member + 1, met.first(rows)};
      else if (call.keep.data == nullptr ||
               shows_any<rows, keys>(HeadOfCall(call, s, b, head_of(stop)), stop.m0, n0))
        return stop;
      else
        stop.m0 += rows;
    }
    return stop;
  }
  __device__ bool full(const Stop& stop) const {
    return call.keep.data == nullptr && n0 + keys <= s.live && met.full(stop.m0, rows);
  }
};

template <typename T, int width, Part part>
__global__ void __launch_bounds__(KeysShape<sizeof(T), width>::kWarps* kWarp, 1)
    attention_bwd_keys_kernel(const AttentionBwd args) {
  using Shape = KeysShape<sizeof(T), width>;
  constexpr int kN = Shape::kN, kRows = Shape::kRows, kKeys = Shape::kKeys;
  constexpr int kStride = kTileStride<T, width>, kFragments = width / 8;
  const Attention& call = args.call;
  const int tiles = (call.keys + kKeys - 1) / kKeys, kv_heads = call.heads / call.group;
  const int64_t b = blockIdx.x / tiles / kv_heads, kv = blockIdx.x / tiles % kv_heads;
  const Sequence s = sequence_of(call, b);
  const int n0 = static_cast<int>(blockIdx.x % tiles) * kKeys;
  if (n0 >= s.tk) return;
  T* k_tile = reinterpret_cast<T*>(shared_floats());
  T *v_tile = k_tile + kKeys * kStride, *passing = v_tile + kKeys * kStride;

  using Walk = QueryTiles<kRows, kKeys>;
  const Walk walk{call, s, b, kv * call.group, n0, queries_met(s, n0, kKeys)};
  const auto copy_queries = [&](const Stop& stop, int stage) {
    const int64_t h = walk.head_of(stop);
    T* tile = passing + stage * 2 * kRows * kStride;
    const Met& met = walk.met;
    copy_rows<kRows, width>(tile, call.q, rows_of<T>(call.q, b, h, s.q0), stop.m0, met.begin,
                            met.end, call.d);
    copy_rows<kRows, width>(tile + kRows * kStride, args.dout, rows_of<T>(args.dout, b, h, s.q0),
                            stop.m0, met.begin, met.end, call.dv);
    copy_commit();
  };
  copy_rows<kKeys, width>(k_tile, call.k, rows_of<T>(call.k, b, kv, s.k0), n0, n0, s.live, call.d);
  copy_rows<kKeys, width>(v_tile, call.v, rows_of<T>(call.v, b, kv, s.k0), n0, n0, s.live, call.dv);
  Stop here = walk.settled({0, walk.met.first(kRows)});
  if (!walk.ended(here)) copy_queries(here, 0);

  const int mine = static_cast<int>(threadIdx.x) / kWarp * 16;  // the warp's first key
  float dk[1][part == Part::dv ? 1 : kFragments][4] = {};
  float dv[1][part == Part::dk ? 1 : kFragments][4] = {};
  for (int stage = 0; !walk.ended(here);) {
    const Stop next = walk.settled({here.member, here.m0 + kRows});
    if (Shape::kStages == 2 && !walk.ended(next)) {
      copy_queries(next, stage ^ 1);
      copy_wait<1>();
    } else {
      copy_wait<0>();
    }
    __syncthreads();  // the queries are there
    const T *q_tile = passing + stage * 2 * kRows * kStride, *dout_tile = q_tile + kRows * kStride;
    if (n0 + mine < s.live) {
      const int64_t h = walk.head_of(here);
      const HeadOfCall head(call, s, b, h);
      const RowNumbers* rows = reinterpret_cast<const RowNumbers*>(args.rows) +
                               b * call.lse_stride_b + h * call.lse_stride_h + s.q0;
      float x[1][kN][4] = {}, products[1][kN][4] = {};
      add_dots<width>(x, k_tile + mine * kStride, q_tile, call.d);
      if (part != Part::dv) add_dots<width>(products, v_tile + mine * kStride, dout_tile, call.dv);
      if (call.scored || !walk.full(here)) score<T, true>(call, head, here.m0, n0 + mine, x);
      differentiate_all<true>(call, head, rows, here.m0, n0 + mine, x, products);
      if constexpr (part != Part::dk)
        add_weighted<width>(
            dv, x, dout_tile, call.dv,
            chosen_rows(rows, here.m0, s.tq, [](const RowNumbers& row) { return row.sees(); }));
      if constexpr (part != Part::dv)
        add_weighted<width>(
            dk, products, q_tile, call.d,
            chosen_rows(rows, here.m0, s.tq, [](const RowNumbers& row) { return row.counts(); }));
    }
    __syncthreads();  // nobody reads the queries any more
    if (Shape::kStages == 2)
      stage ^= 1;
    else if (!walk.ended(next))
      copy_queries(next, 0);
    here = next;
  }
  copy_commit();  // of keys that nobody sees the copies are in no group yet, and end here
  copy_wait<0>();
  __syncthreads();

  const auto put = [&](T* tile, const auto& sums, const Heads& heads, float scale, int d) {
    put_sums<width>(tile + mine * kStride, sums[0], scale, scale);
    __syncwarp();
    T* to = const_cast<T*>(rows_of<T>(heads, b, kv, s.k0));
    store_rows<width>(tile + mine * kStride, heads, to, n0 + mine, s.tk, d);
  };
  if constexpr (part != Part::dv) put(k_tile, dk, args.dk, call.scale, call.d);
  if constexpr (part != Part::dk) put(v_tile, dv, args.dv, 1.0f, call.dv);
}

template <typename T, int width, Part part>
const char* start_keys(const AttentionBwd& args, Stream stream) {
  using Shape = KeysShape<sizeof(T), width>;
  const int64_t tiles = (args.call.keys + Shape::kKeys - 1) / Shape::kKeys;
  const int rows = 2 * Shape::kKeys + 2 * Shape::kStages * Shape::kRows;
  return start(attention_bwd_keys_kernel<T, width, part>,
               tiles * (args.call.heads / args.call.group) * args.call.batch, Shape::kWarps * kWarp,
               rows * kTileStride<T, width> * static_cast<int>(sizeof(T)), stream, args);
}

}  // namespace

const char* launch_keys(const AttentionBwd& args, Stream stream) {
  return for_shape(args.call, [&](auto zero, auto wide) {
    using T = decltype(zero);
    constexpr int kWidth = decltype(wide)::value;
    if constexpr (kWidth == 256) {
      const char* error = start_keys<T, kWidth, Part::dk>(args, stream);
      return error ? error : start_keys<T, kWidth, Part::dv>(args, stream);
    } else {
      return start_keys<T, kWidth, Part::both>(args, stream);
    }
  });
}

}  // namespace tfm_kernels
#endif
