// How the extension and Python meet. See python.cpp.
#pragma once

#include <cxxabi.h>

#include "bind.h"

namespace neuron {

// The exception of a failure, always the same object, and its first traceback.
PyObject* exception_of(Failure&);
bool python_is_there(); // and not at its end
PyObject* exit_module(); // _exit.py

// The end of the process begins. `threads` are those of Python, as the kernel numbers them.
void begin_exit(const std::vector<unsigned long>& threads);
// Have the process end without the destructors of C++, by `_exit` with its exit code.
void leave_at_once();

[[noreturn]] void sleep_for_ever();

// Calls what takes the GIL: where Python ends the thread there, it sleeps instead.
template <class F>
auto without_unwinding(const F& f) {
#ifdef __GLIBCXX__
  try {
    return f();
  } catch (abi::__forced_unwind&) {
    sleep_for_ever();
  }
#else
  return f();
#endif
}

} // namespace neuron
