// How the extension and Python meet. See python.cpp.
#pragma once

#include "bind.h"

namespace neuron {

// The exception of a failure, always the same object, and its first traceback.
PyObject* exception_of(Failure&);
bool python_is_there(); // and not at its end

} // namespace neuron
