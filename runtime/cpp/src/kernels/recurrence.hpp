// Layers with a recurrent state, in terms of a vector of 16 lanes. Included inside an anonymous
// namespace with tiles.hpp and attention.hpp, which it brings.
//
// The state of a head maps a key to values: a lane is a value, and sums run over the numbers of a
// key, those of even places and those of odd ones, one after another. A state is computed from the
// one before it in one way, whether it then lies in the buffer or in scratch memory.
#pragma once

#include "kernels/attention.hpp"

// What a position adds to P panels: they become fma(key[i], values, decay * panel[i]).
template <class V, int P>
struct Update {
  const float* key;
  typename V::Floats decay, values[P];
};

// Add N positions to P panels [size][16], and sum their products with M rows of `size` numbers.
template <class V, int P, int N, int M>
void pass_panels(const Update<V, P>* updates, const float* from, float* to, std::size_t size,
                 const float* const* rows, typename V::Floats (*results)[P]) {
  typename V::Floats sums[2][M + 1][P];
  for (auto& half : sums)
    for (auto& row : half)
      for (auto& sum : row) sum = V::spread(0);
  const auto step = [&](std::size_t i, auto half) {
    typename V::Floats panels[P];
    for (int p = 0; p < P; p++) panels[p] = V::load(from + (p * size + i) * kTile);
    for (int n = 0; n < N; n++) {
      const auto key = V::spread(updates[n].key[i]);
      for (int p = 0; p < P; p++)
        panels[p] = V::fma(key, updates[n].values[p], V::mul(updates[n].decay, panels[p]));
    }
    if constexpr (N > 0)
      for (int p = 0; p < P; p++) V::store(to + (p * size + i) * kTile, panels[p]);
    for (int m = 0; m < M; m++) {
      const auto number = V::spread(rows[m][i]);
      for (int p = 0; p < P; p++)
        sums[half.value][m][p] = V::fma(number, panels[p], sums[half.value][m][p]);
    }
  };
  for (std::size_t i = 0; i + 1 < size; i += 2) {
    step(i, Constant<0>{});
    step(i + 1, Constant<1>{});
  }
  if (size % 2 != 0) step(size - 1, Constant<0>{});
  for (int m = 0; m < M; m++)
    for (int p = 0; p < P; p++) results[m][p] = V::add(sums[0][m][p], sums[1][m][p]);
}

// Positions of the ring that are added at a time.
constexpr int kFolded = 4;

// Run the tokens of a row through P panels of a head.
template <class V, int P>
void recur_panels(const Recurrence& recurrence, const Steps& steps, const RecurrentRow& row,
                  std::size_t head, std::size_t panel, float* scratch) {
  const std::size_t size = recurrence.key_size, values = recurrence.value_size;
  const std::size_t key_head = head / (recurrence.heads / recurrence.key_heads);
  float* state = recurrence.state_of(row.row, head) + panel * size * kTile;
  const auto target = [&](std::size_t position) {
    return position < row.next_base ? state : scratch;
  };
  float* from = state;
  if (row.base == 0) {  // nothing comes before it, whatever the buffer holds
    from = target(0);
    for (std::size_t i = 0; i < P * size; i++) V::store(from + i * kTile, V::spread(0));
  }
  Update<V, P> last{};
  const auto kept = [&](std::size_t position) {
    const float* factors = recurrence.factors_of(row.row, position);
    Update<V, P> update{
        factors + recurrence.keys_at() + key_head * size, V::spread(factors[head]), {}};
    for (int p = 0; p < P; p++)
      update.values[p] = load_before<V>(factors + recurrence.values_at() + head * values,
                                        (panel + p) * kTile, values, 0);
    return update;
  };
  std::size_t position = row.base;
  while (position + 1 < row.start) {  // the last one is added when the first token is computed
    const bool is_cut = position < row.next_base && row.next_base < row.start - 1;
    const std::size_t end = is_cut ? row.next_base : row.start - 1;
    in_parts<kFolded>(end - position, [&](auto n, std::size_t at) {
      Update<V, P> updates[n.value];
      for (int i = 0; i < n.value; i++) updates[i] = kept(position + at + i);
      pass_panels<V, P, n.value, 0>(updates, from, target(position), size, nullptr, nullptr);
      from = target(position);
    });
    position = end;
  }
  if (row.base < row.start) last = kept(row.start - 1);
  for (std::size_t token = row.first; token < row.first + row.count; token++) {
    position = row.start + token - row.first;
    const float* step = steps.prepared + token * recurrence.prepared_size();
    const float* key = step + recurrence.keys_at() + key_head * size;
    const float* rows[] = {step + recurrence.queries_at() + key_head * size, key};
    const auto decay = V::spread(step[head]);
    const auto beta = V::spread(steps.betas[token * recurrence.heads + head]);
    typename V::Floats results[2][P];
    const auto compute = [&](auto n, auto m) {
      float* to = n.value > 0 ? target(position - 1) : from;
      pass_panels<V, P, n.value, m.value>(&last, from, to, size, rows, results);
      from = to;
    };
    if (position == row.base)
      recurrence.is_delta ? compute(Constant<0>{}, Constant<2>{})
                          : compute(Constant<0>{}, Constant<1>{});
    else
      recurrence.is_delta ? compute(Constant<1>{}, Constant<2>{})
                          : compute(Constant<1>{}, Constant<1>{});
    const float* value = steps.values + (token * recurrence.heads + head) * values;
    float* y = steps.y + (token * recurrence.heads + head) * values;
    float* kept_values =
        recurrence.factors_of(row.row, position) + recurrence.values_at() + head * values;
    const auto product = V::spread(step[recurrence.products_at() + key_head]);
    const auto less = V::spread(-step[head]);
    last.key = key;
    last.decay = decay;
    for (int p = 0; p < P; p++) {
      const std::size_t column = (panel + p) * kTile;
      auto added = load_before<V>(value, column, values, 0);
      if (recurrence.is_delta) added = V::fma(less, results[1][p], added);
      last.values[p] = V::mul(beta, added);
      store_before<V>(kept_values, column, values, last.values[p]);
      store_before<V>(y, column, values,
                      V::fma(product, last.values[p], V::mul(decay, results[0][p])));
    }
  }
  if (position < row.next_base) pass_panels<V, P, 1, 0>(&last, from, state, size, nullptr, nullptr);
}

// Panels that are computed at once: each has two sums of even places and two of odd ones.
template <class V>
constexpr int kPanels = V::kVectors < 4 ? 1 : kMostPanels;

template <class V>
void recur_row(const Recurrence& recurrence, const Steps& steps, const RecurrentRow& row,
               std::size_t head, std::size_t first, std::size_t last, float* scratch) {
  in_parts<kPanels<V>>(last - first, [&](auto n, std::size_t at) {
    recur_panels<V, n.value>(recurrence, steps, row, head, first + at, scratch);
  });
}

// Write a row of `size` numbers times `factor`; with an epsilon, of the row divided by its length.
template <class V>
void scale_row(const float* from, std::size_t size, float epsilon, float factor, float* to) {
  auto squares = V::spread(0);
  for (std::size_t i = 0; i < size; i += kTile) {
    const auto part = load_before<V>(from, i, size, 0);
    squares = V::fma(part, part, squares);
  }
  if (epsilon > 0) factor *= 1.0F / __builtin_sqrtf(sum_of_lanes<V>(squares) + epsilon);
  for (std::size_t i = 0; i < size; i += kTile)
    store_before<V>(to, i, size, V::mul(load_before<V>(from, i, size, 0), V::spread(factor)));
}

template <class V>
void prepare_step(const Recurrence& recurrence, const Steps& steps, std::size_t token) {
  const std::size_t heads = recurrence.heads, size = recurrence.key_size;
  float* step = steps.prepared + token * recurrence.prepared_size();
  for (std::size_t i = 0; i < heads; i += kTile)
    store_before<V>(step, i, heads,
                    exponential<V>(load_before<V>(steps.decays + token * heads, i, heads, 0)));
  for (std::size_t head = 0; head < recurrence.key_heads; head++) {
    const std::size_t from = (token * recurrence.key_heads + head) * size;
    float* key = step + recurrence.keys_at() + head * size;
    float* query = step + recurrence.queries_at() + head * size;
    scale_row<V>(steps.keys + from, size, recurrence.epsilon, 1.0F, key);
    scale_row<V>(steps.queries + from, size, recurrence.epsilon, recurrence.scale, query);
    auto sum = V::spread(0);
    for (std::size_t i = 0; i < size; i += kTile)
      sum = V::fma(load_before<V>(key, i, size, 0), load_before<V>(query, i, size, 0), sum);
    step[recurrence.products_at() + head] = sum_of_lanes<V>(sum);
  }
}
