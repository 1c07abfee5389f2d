// Attention in terms of a vector of 16 lanes. Included inside an anonymous namespace
// with tiles.hpp, which it brings.
//
// Scores of 16 keys are 16 lanes: sums run over a head's numbers, one after another. The result is
// a sum over keys, one after another. So nothing is summed across lanes but the weights of a row,
// which are added lane by lane, and the lanes in one order.
#pragma once

#include "kernels/tiles.hpp"

inline const float* queries_of(const Tokens& tokens, std::size_t token) {
  return tokens.queries + (token - tokens.first_query) * tokens.query_stride;
}

// Rotate one head by its position, in halves: Su et al. 2021, arXiv:2104.09864, as Llama does.
inline void rotate(const Attention& attention, std::size_t position, const float* from,
                   float factor, float* to, std::size_t stride) {
  const std::size_t half = attention.angles / 2;
  const float* cosines = attention.cosines + position * half;
  const float* sines = attention.sines + position * half;
  for (std::size_t i = 0; i < half; i++) {
    const float low = from[i], high = from[half + i];
    to[i * stride] = (low * cosines[i] - high * sines[i]) * factor;
    to[(half + i) * stride] = (high * cosines[i] + low * sines[i]) * factor;
  }
  for (std::size_t i = 2 * half; i < attention.key_width; i++) to[i * stride] = from[i] * factor;
}

inline void append_token(const Attention& attention, const Tokens& tokens, std::size_t token) {
  const auto row = static_cast<std::size_t>(tokens.rows[token]);
  const auto position = static_cast<std::size_t>(tokens.positions[token]);
  const std::size_t key_width = attention.key_width, value_width = attention.value_width;
  const std::size_t place = position % attention.positions;
  for (std::size_t head = 0; head < attention.kv_heads; head++) {
    const std::size_t offset = attention.kv_offset(row, head);
    float* group = attention.keys + (offset + place / kTile * kTile) * key_width;
    rotate(attention, position, tokens.keys + token * tokens.key_stride + head * key_width, 1.0F,
           group + place % kTile, kTile);
    const float* from = tokens.values + token * tokens.value_stride + head * value_width;
    float* to = attention.values + (offset + place) * attention.value_stride();
    for (std::size_t i = 0; i < value_width; i++) to[i] = from[i];
  }
}

// Scores of Q queries, `queries_stride` apart, with G groups of 16 keys; those of a query are
// `stride` apart from the next one's. Fetches a group from `ahead`.
template <class V, int Q, int G>
void score(const float* queries, std::size_t queries_stride, const float* groups, std::size_t size,
           float* scores, std::size_t stride, const float* ahead) {
  typename V::Floats sums[Q][G];
  for (int q = 0; q < Q; q++)
    for (int g = 0; g < G; g++) sums[q][g] = V::spread(0);
  for (std::size_t i = 0; i < size; i++) {
    typename V::Floats keys[G];
    for (int g = 0; g < G; g++) keys[g] = V::load(groups + (g * size + i) * kTile);
    V::prefetch(reinterpret_cast<const std::uint8_t*>(ahead + i * kTile));
    for (int q = 0; q < Q; q++) {
      const auto number = V::spread(queries[q * queries_stride + i]);
      for (int g = 0; g < G; g++) sums[q][g] = V::fma(keys[g], number, sums[q][g]);
    }
  }
  for (int q = 0; q < Q; q++)
    for (int g = 0; g < G; g++) V::store(scores + q * stride + g * kTile, sums[q][g]);
}

// Add values of the keys from `first` to `last`, weighted for Q queries, to sums of C vectors,
// those of a query `sums_stride` apart from the next one's. Fetches as many from `ahead`.
template <class V, int Q, int C>
void blend(const float* weights, std::size_t weights_stride, const float* values,
           std::size_t stride, std::size_t first, std::size_t last, float* sums,
           std::size_t sums_stride, const float* ahead) {
  if (first >= last) return;
  typename V::Floats own[Q][C];
  for (int q = 0; q < Q; q++)
    for (int c = 0; c < C; c++) own[q][c] = V::load(sums + q * sums_stride + c * kTile);
  for (std::size_t key = first; key < last; key++) {
    typename V::Floats value[C];
    for (int c = 0; c < C; c++) value[c] = V::load(values + key * stride + c * kTile);
    for (int c = 0; c < C; c++)
      V::prefetch(reinterpret_cast<const std::uint8_t*>(ahead + key * stride + c * kTile));
    for (int q = 0; q < Q; q++) {
      const auto weight = V::spread(weights[q * weights_stride + key]);
      for (int c = 0; c < C; c++) own[q][c] = V::fma(value[c], weight, own[q][c]);
    }
  }
  for (int q = 0; q < Q; q++)
    for (int c = 0; c < C; c++) V::store(sums + q * sums_stride + c * kTile, own[q][c]);
}

// Calls `body(Constant<N>{}, at)` for N = Most and fewer, until `count` are done.
template <int Most, class Body>
void in_parts(std::size_t count, const Body& body, std::size_t at = 0) {
  while (count - at >= Most) {
    body(Constant<Most>{}, at);
    at += Most;
  }
  if constexpr (Most > 1)
    if (at < count) in_parts<Most - 1>(count, body, at);
}

// Add a head's biases to the scores of the keys from `begin`, the first of a group, to `last`,
// which lies after the key of the query itself.
template <class V>
void add_biases(const float* biases, std::size_t reach, float* scores, std::size_t begin,
                std::size_t last) {
  const auto farthest = V::spread(biases[0]);
  for (std::size_t key = begin; key < last; key += kTile) {
    const std::size_t next = key + kTile;
    if (next - 1 + reach <= last) {
      V::store(scores + key, V::add(V::load(scores + key), farthest));
    } else if (key + reach >= last && next <= last) {
      const auto near = V::load(biases + (key + reach - last));
      V::store(scores + key, V::add(V::load(scores + key), near));
    } else {
      for (std::size_t at = key; at < next && at < last; at++)
        scores[at] += biases[at + reach > last ? at + reach - last : 0];
    }
  }
}

// Turn scores of the keys from `first` to `last` into weights, those of other keys of their groups
// into zeros; return the sum of the weights. `biases` are the head's, or none.
template <class V>
float soften(const Attention& attention, const float* biases, float* scores, std::size_t first,
             std::size_t last) {
  const std::size_t begin = first / kTile * kTile, end = (last + kTile - 1) / kTile * kTile;
  const float lowest = -__builtin_huge_valf();
  if (biases != nullptr) add_biases<V>(biases, attention.reach, scores, begin, last);
  if (attention.softcap > 0) {
    // tanh(x) = 1 - 2 / (exp(2 x) + 1)
    const auto cap = V::spread(attention.softcap), inverse = V::spread(2.0F / attention.softcap);
    const auto one = V::spread(1.0F), two = V::spread(-2.0F);
    for (std::size_t key = begin; key < end; key += kTile) {
      const auto power = exponential<V>(V::mul(V::load(scores + key), inverse));
      const auto share = V::divide(two, V::add(power, one));
      V::store(scores + key, V::mul(V::add(share, one), cap));
    }
  }
  for (std::size_t key = begin; key < first; key++) scores[key] = lowest;
  for (std::size_t key = last; key < end; key++) scores[key] = lowest;
  typename V::Floats most_of[V::kVectors];
  for (auto& part : most_of) part = V::spread(lowest);
  in_parts<V::kVectors>((end - begin) / kTile, [&](auto n, std::size_t group) {
    for (int i = 0; i < n.value; i++)
      most_of[i] = V::at_least(V::load(scores + begin + (group + i) * kTile), most_of[i]);
  });
  for (int i = 1; i < V::kVectors; i++) most_of[0] = V::at_least(most_of[i], most_of[0]);
  const float most = largest_of_lanes<V>(most_of[0]);
  auto sum = V::spread(0);
  in_parts<V::kVectors>((end - begin) / kTile, [&](auto n, std::size_t group) {
    typename V::Floats weights[n.value];
    const std::size_t key = begin + group * kTile, next = key + n.value * kTile;
    for (int i = 0; i < n.value; i++)
      weights[i] = V::add(V::load(scores + key + i * kTile), V::spread(-most));
    exponentials<V>(weights);
    for (int i = 0; i < n.value; i++) V::store(scores + key + i * kTile, weights[i]);
    if (key < first || next > last) {
      for (std::size_t at = key; at < next; at++)
        if (at < first || at >= last) scores[at] = 0;
      for (int i = 0; i < n.value; i++) weights[i] = V::load(scores + key + i * kTile);
    }
    for (int i = 0; i < n.value; i++) sum = V::add(sum, weights[i]);
  });
  return sum_of_lanes<V>(sum);
}

// Bytes of values that all queries read before the next ones: a third of a first cache.
constexpr std::size_t kValueBytes = 16 << 10;
// How many keys ahead values are fetched where all queries fit in registers.
constexpr std::size_t kKeysAhead = 16;

template <class V>
void attend_tokens(const Attention& attention, const Tokens& tokens, std::size_t first,
                   std::size_t count, std::size_t kv_head, float* scratch, float* y) {
  const std::size_t size = attention.key_width, shared = attention.heads / attention.kv_heads;
  const std::size_t queries = count * shared, stride = attention.value_stride();
  const std::size_t query_stride = attention.query_stride(), ring = attention.positions;
  const auto position = [&](std::size_t query) {  // queries of a token come one after another
    return static_cast<std::size_t>(tokens.positions[first + query / shared]);
  };
  const auto begin = [&](std::size_t query) {
    const std::size_t own = position(query) + 1;
    return attention.window > 0 && own > attention.window ? own - attention.window : 0;
  };
  const auto end_of = [&](std::size_t query) {
    return tokens.ends == nullptr ? position(query) + 1
                                  : static_cast<std::size_t>(tokens.ends[first + query / shared]);
  };
  const std::size_t offset =
      attention.kv_offset(static_cast<std::size_t>(tokens.rows[first]), kv_head);
  const float* keys = attention.keys + offset * size;
  const float* values = attention.values + offset * stride;
  const std::size_t last = end_of(queries - 1), all_groups = (last + kTile - 1) / kTile;
  const std::size_t width = (all_groups | 1) * kTile;  // odd lines apart: not in one set of a cache

  float* rotated = scratch;  // and sums of values, once scores are known
  float* scores = rotated + queries * query_stride;
  float* totals = scores + queries * width;
  for (std::size_t query = 0; query < queries; query++) {
    const std::size_t head = kv_head * shared + query % shared;
    rotate(attention, position(query), queries_of(tokens, first + query / shared) + head * size,
           attention.scale, rotated + query * query_stride, 1);
  }
  // Few queries wait for the keys, which come fastest one group after another (1.5 times as fast as
  // by two); of many, some groups are read by all while they are in the first cache.
  constexpr int kGroups = V::kVectors < 2 ? V::kVectors : 2;
  const std::size_t lowest = begin(0) / kTile * kTile;
  // Stretches of positions that lie one after another: a ring begins anew after its last.
  for (std::size_t key = lowest, stop = 0; key < all_groups * kTile; key = stop) {
    const std::size_t turn = key / ring * ring;
    stop = turn + ring < all_groups * kTile ? turn + ring : all_groups * kTile;
    const float* stretch = keys + (key - turn) * size;
    const auto score_groups = [&](auto g, std::size_t group) {
      const float* from = stretch + group * kTile * size;
      const std::size_t at = key + group * kTile;
      in_parts<V::kQueries>(queries, [&](auto q, std::size_t query) {
        if (at < end_of(query + q.value - 1))
          score<V, q.value, g.value>(rotated + query * query_stride, query_stride, from, size,
                                     scores + query * width + at, width,
                                     from + (g.value + query / V::kQueries) * kTile * size);
      });
    };
    const std::size_t groups = (stop - key) / kTile;
    if (queries <= 2 * V::kQueries)
      in_parts<1>(groups, score_groups);
    else
      in_parts<kGroups>(groups, score_groups);
  }
  for (std::size_t query = 0; query < queries; query++) {
    const std::size_t head = kv_head * shared + query % shared;
    const float* biases =
        attention.biases == nullptr ? nullptr : attention.biases + head * attention.reach;
    totals[query] =
        soften<V>(attention, biases, scores + query * width, begin(query), end_of(query));
  }

  float* sums = rotated;
  for (std::size_t i = 0; i < queries * query_stride; i += kTile) V::store(sums + i, V::spread(0));
  const bool is_cut = queries > V::kQueries;
  const std::size_t block = is_cut ? kValueBytes / sizeof(float) / stride + 1 : last;
  const std::size_t ahead = is_cut ? block : kKeysAhead;
  for (std::size_t key = begin(0), stop = 0; key < last; key = stop) {
    const std::size_t turn = key / ring * ring, most = turn + ring < last ? turn + ring : last;
    stop = key + block < most ? key + block : most;
    in_parts<V::kQueries>(queries, [&](auto q, std::size_t query) {
      // Keys that all of them see are read once; before and after those, each goes on with its
      // own. What another token's value holds, and be it no number, reaches none that does not see
      // it.
      const auto within = [&](std::size_t at) { return at < key ? key : at < stop ? at : stop; };
      const std::size_t end = end_of(query), latest = begin(query + q.value - 1);
      const std::size_t start = latest < end ? latest : end;
      in_parts<V::kVectors>(stride / kTile, [&](auto c, std::size_t vector) {
        const float* columns = values + vector * kTile - turn * stride;
        const float* weights = scores + query * width;
        float* to = sums + query * query_stride + vector * kTile;
        if (key < start)
          for (int i = 0; i < q.value; i++)
            blend<V, 1, c.value>(weights + i * width, width, columns, stride,
                                 within(begin(query + i)), within(start), to + i * query_stride,
                                 query_stride, columns);
        blend<V, q.value, c.value>(weights, width, columns, stride, within(start), within(end), to,
                                   query_stride, columns + ahead * stride);
        if (stop > end)
          for (int i = 0; i < q.value; i++) {
            const std::size_t own = begin(query + i);
            blend<V, 1, c.value>(weights + i * width, width, columns, stride,
                                 within(own > end ? own : end), within(end_of(query + i)),
                                 to + i * query_stride, query_stride, columns);
          }
      });
    });
  }
  for (std::size_t query = 0; query < queries; query++) {
    const std::size_t token = first + query / shared - tokens.first_query;
    const std::size_t head = kv_head * shared + query % shared;
    float* to_y = y + (token * attention.heads + head) * attention.value_width;
    for (std::size_t column = 0; column < attention.value_width; column += kTile) {
      const auto result =
          V::divide(V::load(sums + query * query_stride + column), V::spread(totals[query]));
      store_before<V>(to_y, column, attention.value_width, result);
    }
  }
}
