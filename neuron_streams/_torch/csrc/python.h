// How the extension and Python meet. See python.cpp.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "core.h"

namespace neuron {

pybind11::object as_python(Ticket); // a Ticket of port.py
// The exception of a failure: always the same object.
pybind11::object exception_of(Failure&);
[[noreturn]] void throw_python(pybind11::error_already_set&);
bool python_is_there(); // and not at its end

} // namespace neuron

namespace pybind11::detail {

// A pair of numbers, whatever its type.
template <>
struct type_caster<neuron::Ticket> {
  PYBIND11_TYPE_CASTER(neuron::Ticket, const_name("Ticket"));
  bool load(handle source, bool) {
    if (!isinstance<tuple>(source) || len(source) != 2) return false;
    auto pair = reinterpret_borrow<tuple>(source);
    value = {pair[0].cast<int64_t>(), pair[1].cast<int64_t>()};
    return true;
  }
  static handle cast(const neuron::Ticket& ticket, return_value_policy, handle) {
    return neuron::as_python(ticket).release();
  }
};

} // namespace pybind11::detail
