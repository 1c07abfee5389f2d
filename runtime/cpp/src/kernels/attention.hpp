// Attention in terms of a vector of 16 lanes. Included inside an anonymous namespace
// with tiles.hpp, which it brings.
//
// Scores of 16 keys are 16 lanes: sums run over a head's numbers, one after another. The result is
// a sum over keys, one after another. So nothing is summed across lanes but the weights of a row,
// which are added lane by lane, and the lanes in one order.
#pragma once

#include "kernels/tiles.hpp"

inline const float* queries_of(const Tokens& tokens, std::size_t token) {
  return tokens.queries + token * tokens.query_stride;
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
  for (std::size_t i = 2 * half; i < attention.head_dim; i++) to[i * stride] = from[i] * factor;
}

inline void append_token(const Attention& attention, const Tokens& tokens, std::size_t token) {
  const auto row = static_cast<std::size_t>(tokens.rows[token]);
  const auto position = static_cast<std::size_t>(tokens.positions[token]);
  const std::size_t size = attention.head_dim, stride = attention.value_stride();
  for (std::size_t head = 0; head < attention.kv_heads; head++) {
    const std::size_t offset = attention.kv_offset(row, head);
    float* group = attention.keys + offset * size + position / kTile * kTile * size;
    rotate(attention, position, tokens.keys + token * tokens.key_stride + head * size, 1.0F,
           group + position % kTile, kTile);
    const float* from = tokens.values + token * tokens.value_stride + head * size;
    float* to = attention.values + (offset + position) * stride;
    for (std::size_t i = 0; i < size; i++) to[i] = from[i];
  }
}

// Scores of Q queries with 16 keys; `scores` of a query are `keys` apart.
template <class V, int Q>
void score(const float* queries, const float* group, std::size_t size, float* scores,
           std::size_t keys) {
  typename V::Floats sums[Q];
  for (int q = 0; q < Q; q++) sums[q] = V::spread(0);
  for (std::size_t i = 0; i < size; i++) {
    const auto key = V::load(group + i * kTile);
    for (int q = 0; q < Q; q++) sums[q] = V::fma(key, V::spread(queries[q * size + i]), sums[q]);
  }
  for (int q = 0; q < Q; q++) V::store(scores + q * keys, sums[q]);
}

// Add values, weighted for Q queries, over the keys from `first` to `last`; sums of a query are C.
template <class V, int Q, int C>
void blend(const float* weights, std::size_t keys, const float* values, std::size_t stride,
           std::size_t first, std::size_t last, typename V::Floats (*sums)[C]) {
  typename V::Floats own[Q][C];
  for (int q = 0; q < Q; q++)
    for (int c = 0; c < C; c++) own[q][c] = sums[q][c];
  for (std::size_t key = first; key < last; key++) {
    typename V::Floats value[C];
    for (int c = 0; c < C; c++) value[c] = V::load(values + key * stride + c * kTile);
    for (int q = 0; q < Q; q++) {
      const auto weight = V::spread(weights[q * keys + key]);
      for (int c = 0; c < C; c++) own[q][c] = V::fma(value[c], weight, own[q][c]);
    }
  }
  for (int q = 0; q < Q; q++)
    for (int c = 0; c < C; c++) sums[q][c] = own[q][c];
}

// Turn scores of the keys from `first` to `last` into weights, those of other keys of their groups
// into zeros; return the sum of the weights.
template <class V>
float soften(const Attention& attention, float* scores, std::size_t first, std::size_t last) {
  const std::size_t begin = first / kTile * kTile, end = (last + kTile - 1) / kTile * kTile;
  const float lowest = -__builtin_huge_valf();
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
  auto highest = V::spread(lowest);
  for (std::size_t key = begin; key < end; key += kTile)
    highest = V::at_least(V::load(scores + key), highest);
  const float most = largest_of_lanes<V>(highest);
  for (std::size_t key = begin; key < end; key += kTile) {
    const auto below = V::add(V::load(scores + key), V::spread(-most));
    V::store(scores + key, exponential<V>(below));
  }
  for (std::size_t key = begin; key < first; key++) scores[key] = 0;
  for (std::size_t key = last; key < end; key++) scores[key] = 0;
  auto sum = V::spread(0);
  for (std::size_t key = begin; key < end; key += kTile) sum = V::add(sum, V::load(scores + key));
  return sum_of_lanes<V>(sum);
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

template <class V>
void attend_tokens(const Attention& attention, const Tokens& tokens, std::size_t first,
                   std::size_t count, std::size_t kv_head, float* scratch, float* y) {
  const std::size_t size = attention.head_dim, shared = attention.heads / attention.kv_heads;
  const std::size_t queries = count * shared, stride = attention.value_stride();
  const auto position = [&](std::size_t query) {  // queries of a token come one after another
    return static_cast<std::size_t>(tokens.positions[first + query / shared]);
  };
  const auto begin = [&](std::size_t query) {
    const std::size_t end = position(query) + 1;
    return attention.window > 0 && end > attention.window ? end - attention.window : 0;
  };
  const std::size_t offset =
      attention.kv_offset(static_cast<std::size_t>(tokens.rows[first]), kv_head);
  const float* keys = attention.keys + offset * size;
  const float* values = attention.values + offset * stride;
  const std::size_t groups = position(queries - 1) / kTile + 1, width = groups * kTile;

  float* rotated = scratch;
  float* totals = rotated + queries * size;
  float* scores = totals + queries;
  for (std::size_t query = 0; query < queries; query++) {
    const std::size_t head = kv_head * shared + query % shared;
    rotate(attention, position(query), queries_of(tokens, first + query / shared) + head * size,
           attention.scale, rotated + query * size, 1);
  }
  for (std::size_t group = begin(0) / kTile; group < groups; group++)
    in_parts<V::kQueries>(queries, [&](auto n, std::size_t query) {
      score<V, n.value>(rotated + query * size, keys + group * kTile * size, size,
                        scores + query * width + group * kTile, width);
    });
  for (std::size_t query = 0; query < queries; query++)
    totals[query] = soften<V>(attention, scores + query * width, begin(query), position(query) + 1);

  in_parts<V::kSumQueries>(queries, [&](auto q, std::size_t query) {
    // Keys that all of them see are read once; before and behind those, each goes on with its own.
    // What another token's value holds, and be it no number, reaches none that does not see it.
    const std::size_t end = position(query) + 1, latest = begin(query + q.value - 1);
    const std::size_t start = latest < end ? latest : end;
    in_parts<V::kSumVectors>(stride / kTile, [&](auto c, std::size_t vector) {
      const float* columns = values + vector * kTile;
      typename V::Floats sums[q.value][c.value];
      for (int i = 0; i < q.value; i++) {
        for (int part = 0; part < c.value; part++) sums[i][part] = V::spread(0);
        blend<V, 1, c.value>(scores + (query + i) * width, width, columns, stride, begin(query + i),
                             start, sums + i);
      }
      blend<V, q.value, c.value>(scores + query * width, width, columns, stride, start, end, sums);
      for (int i = 0; i < q.value; i++) {
        const std::size_t own = begin(query + i);
        blend<V, 1, c.value>(scores + (query + i) * width, width, columns, stride,
                             own > end ? own : end, position(query + i) + 1, sums + i);
      }
      for (int i = 0; i < q.value; i++) {
        const std::size_t token = first + (query + i) / shared, head = (query + i) % shared;
        const auto total = V::spread(totals[query + i]);
        float* to_y = y + token * attention.heads * size + (kv_head * shared + head) * size;
        for (int part = 0; part < c.value; part++) {
          const std::size_t column = (vector + part) * kTile;
          store_before<V>(to_y, column, size, V::divide(sums[i][part], total));
        }
      }
    });
  });
}
