// Layers with a recurrent state, in terms of a vector of 16 lanes. Included inside an anonymous
// namespace with tiles.hpp and attention.hpp, which it brings.
//
// The state of a head maps a key to values: a lane is a value, and sums run over the numbers of a
// key, those of even places and those of odd ones, one after another. A state is computed from the
// one before it in one way, whether it then lies in the buffer or in scratch memory.
#pragma once

#include "kernels/attention.hpp"

// What a position adds to P vectors of a panel: they become fma(key[i], values, decay * vector).
template <class V, int P>
struct Update {
  const float* key;
  typename V::Floats decay, values[P];
};

// A panel [size][stride], and where it goes.
struct Panel {
  const float* from;
  float* to;
  std::size_t size, stride;
};

// Add N positions to P vectors of a panel, and sum their products with M rows of `size` numbers.
template <class V, int P, int N, int M>
void pass_panel(const Panel& panel, const Update<V, P>* updates, const float* const* rows,
                typename V::Floats (*results)[P]) {
  Update<V, P> own[N + 1];  // a copy, which no store changes: registers hold it
  for (int n = 0; n < N; n++) own[n] = updates[n];
  typename V::Floats sums[2][M + 1][P];
  for (auto& half : sums)
    for (auto& row : half)
      for (auto& sum : row) sum = V::spread(0);
  const std::size_t size = panel.size, stride = panel.stride;
  const float* from = panel.from;
  float* to = panel.to;
  const auto step = [&](std::size_t i, auto half) {
    typename V::Floats values[P];
    for (int p = 0; p < P; p++) values[p] = V::load(from + i * stride + p * kTile);
    if constexpr (P * kTile < kPanel)  // the other half, which comes next
      V::prefetch(reinterpret_cast<const std::uint8_t*>(from + i * stride + P * kTile));
    for (int n = 0; n < N; n++) {
      const auto key = V::spread(own[n].key[i]);
      for (int p = 0; p < P; p++)
        values[p] = V::fma(key, own[n].values[p], V::mul(own[n].decay, values[p]));
    }
    if constexpr (N > 0)
      for (int p = 0; p < P; p++) V::store(to + i * stride + p * kTile, values[p]);
    for (int m = 0; m < M; m++) {
      const auto number = V::spread(rows[m][i]);
      for (int p = 0; p < P; p++)
        sums[half.value][m][p] = V::fma(number, values[p], sums[half.value][m][p]);
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

// Run the tokens of a row through P vectors of a head, from `column` on.
template <class V, int P>
void recur_vectors(const Recurrence& recurrence, const Steps& steps, const RecurrentRow& row,
                   std::size_t head, std::size_t column, float* scratch) {
  const std::size_t values = recurrence.value_size, heads = recurrence.heads;
  const std::size_t keys_at =
      recurrence.keys_at() + head / (heads / recurrence.key_heads) * recurrence.key_size;
  const std::size_t values_at = recurrence.values_at() + head * values;
  float* state = recurrence.state_of(row.row, head) + recurrence.column_at(column);
  Panel panel{state, state, recurrence.key_size, recurrence.panel_stride(column)};
  const auto target = [&](std::size_t position) {
    return position < row.next_base ? state : scratch;
  };
  // Add N positions, the last of which is `position`, and compute products as pass_panel does.
  const auto add = [&](auto n, auto m, std::size_t position, const Update<V, P>* updates,
                       const float* const* rows, typename V::Floats(*results)[P]) {
    if (n.value > 0) panel.to = target(position);
    pass_panel<V, P, n.value, m.value>(panel, updates, rows, results);
    if (n.value > 0) panel.from = panel.to;
  };
  if (row.base == 0) {  // nothing comes before it, whatever the buffer holds
    for (std::size_t i = 0; i < panel.size; i++)
      for (int p = 0; p < P; p++) V::store(target(0) + i * panel.stride + p * kTile, V::spread(0));
    panel.from = target(0);
  }
  const auto update_of = [&](const float* factors) {
    Update<V, P> update{factors + keys_at, V::spread(factors[head]), {}};
    for (int p = 0; p < P; p++)
      update.values[p] = load_before<V>(factors + values_at, column + p * kTile, values, 0);
    return update;
  };
  // Fetch where a token is read and written: a store that waits for a line holds up all after it.
  const auto fetch_token = [&](std::size_t token) {
    const std::size_t own = (token * heads + head) * values + column;
    const float* places[] = {
        steps.values + own, steps.y + own,
        steps.prepared + token * recurrence.prepared_size() + values_at + column};
    for (const float* place : places)
      for (int p = 0; p < P; p++)
        V::prefetch(reinterpret_cast<const std::uint8_t*>(place + p * kTile));
  };
  fetch_token(row.first);
  std::size_t position = row.base;
  while (position + 1 < row.start) {  // the last one is added when the first token is computed
    const bool is_cut = position < row.next_base && row.next_base < row.start - 1;
    const std::size_t end = is_cut ? row.next_base : row.start - 1;
    in_parts<kFolded>(end - position, [&](auto n, std::size_t at) {
      Update<V, P> updates[n.value];
      for (int i = 0; i < n.value; i++)
        updates[i] = update_of(recurrence.factors_of(row.row, position + at + i));
      add(n, Constant<0>{}, position, updates, nullptr, nullptr);
    });
    position = end;
  }
  Update<V, P> last{};
  if (row.base < row.start) last = update_of(recurrence.factors_of(row.row, row.start - 1));
  for (std::size_t i = 0; i < row.count; i++) {
    const std::size_t token = row.first + i;
    position = row.start + i;
    fetch_token(token + 1);
    float* step = steps.prepared + token * recurrence.prepared_size();
    const float* rows[] = {step + keys_at + recurrence.queries_at() - recurrence.keys_at(),
                           step + keys_at};
    typename V::Floats results[2][P] = {};  // the second is of the delta rule alone
    const auto compute = [&](auto n) {
      recurrence.is_delta ? add(n, Constant<2>{}, position - 1, &last, rows, results)
                          : add(n, Constant<1>{}, position - 1, &last, rows, results);
    };
    position == row.base ? compute(Constant<0>{}) : compute(Constant<1>{});
    const std::size_t own = (token * heads + head) * values;
    const float product = step[recurrence.products_at() + head / (heads / recurrence.key_heads)];
    for (int p = 0; p < P; p++) {
      const std::size_t at = column + p * kTile;
      auto added = load_before<V>(steps.values + own, at, values, 0);
      if (recurrence.is_delta) added = V::fma(V::spread(-step[head]), results[1][p], added);
      added = V::mul(V::spread(steps.betas[token * heads + head]), added);
      last.values[p] = added;
      store_before<V>(step + values_at, at, values, added);
      const auto before = V::mul(V::spread(step[head]), results[0][p]);
      store_before<V>(steps.y + own, at, values, V::fma(V::spread(product), added, before));
    }
    last.key = step + keys_at, last.decay = V::spread(step[head]);
  }
  if (position < row.next_base)
    add(Constant<1>{}, Constant<0>{}, position, &last, nullptr, nullptr);
}

// Vectors that are computed at once: each has two sums of even places and two of odd ones.
template <class V>
constexpr int kSide = V::kVectors < 4 ? 1 : kPanel / kTile;

template <class V>
void recur_head(const Recurrence& recurrence, const Steps& steps, const RecurrentRow& row,
                std::size_t head, float* scratch) {
  in_parts<kSide<V>>(recurrence.value_stride() / kTile, [&](auto n, std::size_t vector) {
    recur_vectors<V, n.value>(recurrence, steps, row, head, vector * kTile, scratch);
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
