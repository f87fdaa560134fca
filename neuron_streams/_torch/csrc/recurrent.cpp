// Recurrent layers and cells, made of the operators that the CPU makes them of.
//
// Torch's composites look at the type of the device: for any but the CPU they take fused cells,
// which the CPU has no kernel for, and multiply the inputs of each step by itself, which gives
// other last bits than one product over all steps. oneDNN's layer is the CPU's for an LSTM.
#include "window.h"

#include <algorithm>

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/RNN.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mkldnn_rnn_layer.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

namespace neuron {

namespace {

using Tensors = std::vector<at::Tensor>;
using State = Tensors; // h, and for an LSTM c

// What one layer knows in one direction; what it does without is undefined.
struct Weights {
  at::Tensor ih, hh, bias_ih, bias_hh, projection;

  at::Tensor of_input(const at::Tensor& x) const { return at::linear(x, ih, bias_ih); }
  at::Tensor of_hidden(const at::Tensor& h) const { return at::linear(h, hh, bias_hh); }
};

// -- cells --------------------------------------------------------------------------------------

// One step. `input` has been through the weights, the state has not.
using Cell = State (*)(const at::Tensor& input, const State&, const Weights&);

State tanh_cell(const at::Tensor& input, const State& state, const Weights& weights) {
  return {at::tanh(weights.of_hidden(state[0]).add_(input))};
}

State relu_cell(const at::Tensor& input, const State& state, const Weights& weights) {
  return {at::relu(weights.of_hidden(state[0]).add_(input))};
}

State lstm_cell(const at::Tensor& input, const State& state, const Weights& weights) {
  Tensors gates = weights.of_hidden(state[0]).add_(input).unsafe_chunk(4, 1);
  const at::Tensor in = gates[0].sigmoid_(), forget = gates[1].sigmoid_();
  const at::Tensor cell = gates[2].tanh_(), out = gates[3].sigmoid_();
  const at::Tensor c = forget.mul(state[1]).add_(in.mul(cell));
  at::Tensor h = out.mul(c.tanh());
  if (weights.projection.defined()) h = at::matmul(h, weights.projection.t());
  return {h, c};
}

State gru_cell(const at::Tensor& input, const State& state, const Weights& weights) {
  const Tensors mine = input.unsafe_chunk(3, 1);
  Tensors gates = weights.of_hidden(state[0]).unsafe_chunk(3, 1);
  const at::Tensor reset = gates[0].add_(mine[0]).sigmoid_();
  const at::Tensor update = gates[1].add_(mine[1]).sigmoid_();
  const at::Tensor fresh = mine[2].add(gates[2].mul_(reset)).tanh_();
  return {state[0].sub(fresh).mul_(update).add_(fresh)};
}

// -- one layer in one direction -----------------------------------------------------------------

struct Outcome {
  at::Tensor output;
  State last;
};

// What a layer runs over: steps of one size, or of the sizes that a PackedSequence has.
struct Sequence {
  at::Tensor data;
  std::vector<int64_t> sizes; // empty where all are alike
  bool packed = false;
};

State each(const State& state, const std::function<at::Tensor(const at::Tensor&)>& f) {
  State made;
  for (const at::Tensor& tensor : state) made.push_back(f(tensor));
  return made;
}

State rows(const State& state, int64_t begin, int64_t end) {
  return each(state, [&](const at::Tensor& x) { return x.narrow(0, begin, end - begin); });
}

State joined(const std::vector<State>& parts) {
  State made;
  for (size_t k = 0; k < parts[0].size(); k++) {
    Tensors column;
    for (const State& part : parts) column.push_back(part[k]);
    made.push_back(at::cat(column, 0));
  }
  return made;
}

Outcome run_even(Cell cell, const at::Tensor& input, State state, const Weights& weights, bool back) {
  Tensors steps = weights.of_input(input).unbind(0), outputs;
  TORCH_CHECK(!steps.empty(), "Expected sequence length to be larger than 0 in RNN");
  if (back) std::reverse(steps.begin(), steps.end());
  for (const at::Tensor& step : steps) {
    state = cell(step, state, weights);
    outputs.push_back(state[0]);
  }
  if (back) std::reverse(outputs.begin(), outputs.end());
  return {at::stack(outputs, 0), state};
}

// Sequences end one after the other: the state loses the rows of those that have ended.
Outcome run_packed(Cell cell, const Sequence& input, State state, const Weights& weights) {
  const at::Tensor whole = weights.of_input(input.data);
  Tensors outputs;
  std::vector<State> ended;
  int64_t offset = 0, before = input.sizes[0];
  for (const int64_t size : input.sizes) {
    const at::Tensor step = whole.narrow(0, offset, size);
    offset += size;
    if (size < before) {
      ended.push_back(rows(state, size, before));
      state = rows(state, 0, size);
    }
    before = size;
    state = cell(step, state, weights);
    outputs.push_back(state[0]);
  }
  ended.push_back(state);
  std::reverse(ended.begin(), ended.end());
  return {at::cat(outputs, 0), joined(ended)};
}

// From the end: sequences begin one after the other.
Outcome run_packed_back(
    Cell cell, const Sequence& input, const State& first, const Weights& weights) {
  const at::Tensor whole = weights.of_input(input.data);
  Tensors outputs;
  int64_t offset = input.data.size(0), before = input.sizes.back();
  State state = rows(first, 0, before);
  for (size_t i = input.sizes.size(); i-- > 0;) {
    const int64_t size = input.sizes[i];
    if (size > before) state = joined({state, rows(first, before, size)});
    const at::Tensor step = whole.narrow(0, offset - size, size);
    offset -= size;
    before = size;
    state = cell(step, state, weights);
    outputs.push_back(state[0]);
  }
  std::reverse(outputs.begin(), outputs.end());
  return {at::cat(outputs, 0), state};
}

Outcome run_layer(
    Cell cell, const Sequence& input, const State& state, const Weights& weights, bool back) {
  if (!input.packed) return run_even(cell, input.data, state, weights, back);
  return back ? run_packed_back(cell, input, state, weights)
              : run_packed(cell, input, state, weights);
}

// -- a stack of layers --------------------------------------------------------------------------

struct Settings {
  bool has_biases;
  int64_t layers;
  double dropout;
  bool train, bidirectional;
};

std::vector<Weights> grouped(at::TensorList list, bool has_biases, bool projects) {
  const size_t each = 2 + (has_biases ? 2 : 0) + (projects ? 1 : 0);
  TORCH_CHECK(list.size() % each == 0, "got an incorrect number of RNN parameters");
  std::vector<Weights> made;
  for (size_t i = 0; i < list.size(); i += each) {
    Weights weights{list[i], list[i + 1], {}, {}, {}};
    if (has_biases) weights.bias_ih = list[i + 2], weights.bias_hh = list[i + 3];
    if (projects) weights.projection = list[i + each - 1];
    made.push_back(std::move(weights));
  }
  return made;
}

at::Tensor between(const at::Tensor& output, const Settings& settings, int64_t layer) {
  const bool drops = settings.dropout != 0 && settings.train && layer < settings.layers - 1;
  return drops ? at::dropout(output, settings.dropout, true) : output;
}

// Returns the output, and each part of the state stacked over the layers.
Tensors run_stack(
    Cell cell, Sequence input, const State& first, at::TensorList parameters,
    const Settings& settings, bool projects = false) {
  const auto weights = grouped(parameters, settings.has_biases, projects);
  std::vector<Tensors> begins;
  for (const at::Tensor& part : first) begins.push_back(part.unbind(0));
  const size_t directions = settings.bidirectional ? 2 : 1;
  const size_t count = static_cast<size_t>(settings.layers) * directions;
  for (const Tensors& begin : begins)
    TORCH_CHECK(begin.size() == count, "Expected more hidden states in stacked_rnn");
  TORCH_CHECK(weights.size() == count, "Expected more weights in stacked_rnn");
  std::vector<Tensors> ends(first.size());
  for (int64_t layer = 0; layer < settings.layers; layer++) {
    Tensors outputs;
    for (size_t direction = 0; direction < directions; direction++) {
      const size_t at = static_cast<size_t>(layer) * directions + direction;
      State state;
      for (const Tensors& begin : begins) state.push_back(begin[at]);
      Outcome made = run_layer(cell, input, state, weights[at], direction == 1);
      outputs.push_back(std::move(made.output));
      for (size_t k = 0; k < ends.size(); k++) ends[k].push_back(made.last[k]);
    }
    const at::Tensor output = directions == 1 ? outputs[0] : at::cat(outputs, -1);
    input.data = between(output, settings, layer);
  }
  Tensors results{input.data};
  for (const Tensors& end : ends) results.push_back(at::stack(end, 0));
  return results;
}

Sequence packed(const at::Tensor& data, const at::Tensor& batch_sizes) {
  TORCH_CHECK(batch_sizes.numel() > 0, "Expected sequence length to be larger than 0 in RNN");
  const at::Tensor sizes = batch_sizes.contiguous();
  TORCH_CHECK(
      sizes.is_cpu() && sizes.scalar_type() == at::kLong,
      "batch_sizes should be a tensor of int64 on the CPU");
  const auto* begin = sizes.const_data_ptr<int64_t>();
  return {data, {begin, begin + sizes.numel()}, true};
}

// -- oneDNN's LSTM ------------------------------------------------------------------------------

// Whether the processor is one for which the CPU takes oneDNN for this dtype.
bool onednn_computes_in(at::ScalarType dtype) {
  if (dtype == at::kFloat) return true;
  if (dtype != at::kBFloat16 && (dtype != at::kHalf || at::GradMode::is_enabled())) return false;
  const char* name = dtype == at::kHalf ? "mkldnn::_is_mkldnn_fp16_supported"
                                        : "mkldnn::_is_mkldnn_bf16_supported";
  const auto found = c10::Dispatcher::singleton().findSchema({name, ""});
  return found.has_value() && found->typed<bool()>().call();
}

bool onednn_takes(const at::Tensor& input, at::TensorList hx, at::TensorList parameters) {
  auto ours = [](const at::Tensor& tensor) { return is_ours(tensor); };
  return at::globalContext().hasMKLDNN() && at::globalContext().userEnabledMkldnn() &&
      ours(input) && input.numel() != 0 && std::all_of(hx.begin(), hx.end(), ours) &&
      std::all_of(parameters.begin(), parameters.end(), ours) &&
      onednn_computes_in(input.scalar_type());
}

Tensors run_onednn(
    const at::Tensor& given, const State& first, at::TensorList parameters,
    const Settings& settings, bool batch_first) {
  constexpr int64_t kLstm = 2; // of oneDNN's kinds of layers
  const auto weights = grouped(parameters, settings.has_biases, false);
  at::Tensor input = (batch_first ? given.transpose(0, 1) : given).contiguous();
  const at::Tensor h = first[0].contiguous(), c = first[1].contiguous();
  const int64_t directions = settings.bidirectional ? 2 : 1;
  Tensors last_h, last_c;
  for (int64_t layer = 0; layer < settings.layers; layer++) {
    Tensors outputs;
    for (int64_t direction = 0; direction < directions; direction++) {
      const int64_t at = layer * directions + direction;
      const Weights& own = weights.at(static_cast<size_t>(at));
      auto bias = [&](const at::Tensor& there, const at::Tensor& like) {
        return settings.has_biases ? there : at::zeros(like.sizes(), like.options());
      };
      auto [output, next_h, next_c, workspace] = at::mkldnn_rnn_layer(
          input, own.ih, own.hh, bias(own.bias_ih, own.ih), bias(own.bias_hh, own.hh), h[at], c[at],
          direction == 1, {}, kLstm, first[0].size(2), settings.layers, settings.has_biases,
          settings.bidirectional, batch_first, settings.train);
      outputs.push_back(output);
      last_h.push_back(next_h);
      last_c.push_back(next_c);
    }
    const at::Tensor output = directions == 1 ? outputs[0] : at::cat(outputs, -1);
    input = between(output, settings, layer);
  }
  if (batch_first) input = input.transpose(0, 1);
  return {input, at::stack(last_h, 0), at::stack(last_c, 0)};
}

// -- the operators ------------------------------------------------------------------------------

using One = std::tuple<at::Tensor, at::Tensor>;
using Two = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

template <Cell cell>
One layers(
    const at::Tensor& input, const at::Tensor& hx, at::TensorList parameters, bool has_biases,
    int64_t count, double dropout, bool train, bool bidirectional, bool batch_first) {
  at::native::check_attributes(input, parameters, hx);
  const Settings settings{has_biases, count, dropout, train, bidirectional};
  const at::Tensor steps = batch_first ? input.transpose(0, 1) : input;
  Tensors made = run_stack(cell, {steps, {}, false}, {hx}, parameters, settings);
  if (batch_first) made[0] = made[0].transpose(0, 1);
  return {made[0], made[1]};
}

template <Cell cell>
One packed_layers(
    const at::Tensor& data, const at::Tensor& batch_sizes, const at::Tensor& hx,
    at::TensorList parameters, bool has_biases, int64_t count, double dropout, bool train,
    bool bidirectional) {
  const Settings settings{has_biases, count, dropout, train, bidirectional};
  Tensors made = run_stack(cell, packed(data, batch_sizes), {hx}, parameters, settings);
  return {made[0], made[1]};
}

// Whether the output has another size than the cell, by a matrix of its own.
bool projects(at::TensorList hx) {
  TORCH_CHECK(hx.size() == 2, "lstm expects two hidden states");
  for (const at::Tensor& part : hx)
    TORCH_CHECK(
        part.dim() == 3, "For batched 3-D input, hx and cx should also be 3-D but got ", part.dim(),
        "-D tensor");
  return hx[0].size(2) != hx[1].size(2);
}

Two lstm(
    const at::Tensor& input, at::TensorList hx, at::TensorList parameters, bool has_biases,
    int64_t count, double dropout, bool train, bool bidirectional, bool batch_first) {
  const Settings settings{has_biases, count, dropout, train, bidirectional};
  const bool projected = projects(hx);
  at::native::check_attributes(input, parameters, hx);
  Tensors made;
  if (!projected && onednn_takes(input, hx, parameters)) {
    made = run_onednn(input, hx.vec(), parameters, settings, batch_first);
  } else {
    const at::Tensor steps = batch_first ? input.transpose(0, 1) : input;
    made = run_stack(
        &lstm_cell, {steps, {}, false}, hx.vec(), parameters, settings, projected);
    if (batch_first) made[0] = made[0].transpose(0, 1);
  }
  return {made[0], made[1], made[2]};
}

Two packed_lstm(
    const at::Tensor& data, const at::Tensor& batch_sizes, at::TensorList hx,
    at::TensorList parameters, bool has_biases, int64_t count, double dropout, bool train,
    bool bidirectional) {
  const Settings settings{has_biases, count, dropout, train, bidirectional};
  const bool projected = projects(hx);
  Tensors made = run_stack(
      &lstm_cell, packed(data, batch_sizes), hx.vec(), parameters, settings, projected);
  return {made[0], made[1], made[2]};
}

// One step of a cell that is called by itself.
State step(
    Cell cell, int64_t gates, const at::Tensor& input, const State& state, const Weights& weights) {
  const at::Tensor &ih = weights.ih, &hh = weights.hh;
  const int64_t hidden = hh.size(1);
  TORCH_CHECK(
      ih.size(0) == gates * hidden && hh.size(0) == gates * hidden, "weight_ih and weight_hh ",
      "should have ", gates * hidden, " rows, but have ", ih.size(0), " and ", hh.size(0));
  TORCH_CHECK(
      input.size(1) == ih.size(1), "input has inconsistent input_size: got ", input.size(1),
      " expected ", ih.size(1));
  for (size_t i = 0; i < state.size(); i++) {
    TORCH_CHECK(
        input.size(0) == state[i].size(0), "Input batch size ", input.size(0),
        " doesn't match hidden", i, " batch size ", state[i].size(0));
    TORCH_CHECK(
        state[i].size(1) == hidden, "hidden", i, " has inconsistent hidden_size: got ",
        state[i].size(1), ", expected ", hidden);
  }
  return cell(weights.of_input(input), state, weights);
}

using MaybeTensor = std::optional<at::Tensor>;

template <Cell cell, int64_t gates>
at::Tensor one_step(
    const at::Tensor& input, const at::Tensor& hx, const at::Tensor& ih, const at::Tensor& hh,
    const MaybeTensor& bias_ih, const MaybeTensor& bias_hh) {
  const at::Tensor none;
  return step(
      cell, gates, input, {hx}, {ih, hh, bias_ih.value_or(none), bias_hh.value_or(none), none})[0];
}

One one_lstm_step(
    const at::Tensor& input, at::TensorList hx, const at::Tensor& ih, const at::Tensor& hh,
    const MaybeTensor& bias_ih, const MaybeTensor& bias_hh) {
  TORCH_CHECK(hx.size() == 2, "lstm_cell expects two hidden states");
  const at::Tensor none;
  State made = step(
      &lstm_cell, 4, input, hx.vec(),
      {ih, hh, bias_ih.value_or(none), bias_hh.value_or(none), none});
  return {made[0], made[1]};
}

void register_recurrent(torch::Library& m) {
  m.impl("rnn_tanh.input", TORCH_FN(layers<&tanh_cell>));
  m.impl("rnn_relu.input", TORCH_FN(layers<&relu_cell>));
  m.impl("gru.input", TORCH_FN(layers<&gru_cell>));
  m.impl("lstm.input", TORCH_FN(lstm));
  m.impl("rnn_tanh.data", TORCH_FN(packed_layers<&tanh_cell>));
  m.impl("rnn_relu.data", TORCH_FN(packed_layers<&relu_cell>));
  m.impl("gru.data", TORCH_FN(packed_layers<&gru_cell>));
  m.impl("lstm.data", TORCH_FN(packed_lstm));
  m.impl("rnn_tanh_cell", TORCH_FN((one_step<&tanh_cell, 1>)));
  m.impl("rnn_relu_cell", TORCH_FN((one_step<&relu_cell, 1>)));
  m.impl("gru_cell", TORCH_FN((one_step<&gru_cell, 3>)));
  m.impl("lstm_cell", TORCH_FN(one_lstm_step));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { register_recurrent(m); }
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { register_recurrent(m); }

} // namespace

} // namespace neuron
