// The device's generator. See random.cpp.
#pragma once

#include <ATen/core/Generator.h>

#include "core.h"

namespace neuron {

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);

// A generator of the host with the numbers of the next command: they depend on the seed and on how
// many commands drew before, not on when this one runs.
at::Generator next_numbers(at::Generator& device_generator);

} // namespace neuron
