// The end of the process, for threads that it overtakes.
//
// Python ends a thread that asks for the GIL after the end of the interpreter by pthread_exit, which
// unwinds the stack: frames of C++ would let go of objects without the GIL, or terminate. Such a
// thread sleeps instead until the process is gone, as it does from Python 3.14 on. Those that have
// used the device, among them autograd's, do so from when the exit begins: the runtime is closed
// then, and what a wait or a submission raises is for no one.
#include "python.h"
#include "stream.h"

#include <cstdio>
#include <cstdlib>
#include <unordered_set>

#include <unistd.h>

namespace neuron {

namespace {

using Threads = std::unordered_set<unsigned long>; // as the kernel numbers them

struct Ending {
  std::mutex mutex;
  Threads users; // threads that have used the device, and live
  Threads held; // written before `began`
  std::atomic<bool> began{false}, leaves_at_once{false};
  std::atomic<int> asleep{0};
  std::terminate_handler terminate = nullptr;
};
Ending& ending() {
  static auto* made = new Ending;
  return *made;
}

thread_local int locks = 0; // of Held, on this thread

struct User {
  const unsigned long thread = PyThread_get_thread_native_id();
  User() {
    std::lock_guard lock(ending().mutex);
    ending().users.insert(thread);
  }
  ~User() {
    std::lock_guard lock(ending().mutex);
    ending().users.erase(thread);
  }
};

bool is_held() { return ending().held.count(PyThread_get_thread_native_id()) != 0; }

// Torch's own waits take the GIL in destructors, where that pthread_exit ends in std::terminate.
[[noreturn]] void terminate_or_sleep() {
  if (is_held() && !PyGILState_Check()) sleep_for_ever();
  if (ending().terminate) ending().terminate();
  std::abort();
}

void flush(std::FILE* file) {
#ifdef __GLIBC__
  if (ftrylockfile(file) != 0) return; // by a thread that sleeps, perhaps
  fflush_unlocked(file);
  funlockfile(file);
#endif
}

// Destructors of C++ must not run beside threads that are in the middle of something: autograd's
// waits ten seconds for its own.
[[maybe_unused]] void leave(int code, void*) {
  if (!ending().leaves_at_once && ending().asleep == 0) return;
  flush(stdout);
  flush(stderr);
  _exit(code);
}

} // namespace

void note_user() {
  if (on_worker) return; // it ends by itself, and is joined
  [[maybe_unused]] thread_local const User user;
}

void sleep_for_ever() {
  ending().asleep++;
  for (;;) pause();
}

void leave_at_once() { ending().leaves_at_once = true; }

bool exit_has_begun() { return ending().began.load(std::memory_order_acquire); }

void begin_exit(const std::vector<unsigned long>& threads) {
  Ending& end = ending();
  if (end.began) return;
  const unsigned long caller = PyThread_get_thread_native_id();
  {
    std::lock_guard lock(end.mutex);
    end.held = end.users;
    for (const unsigned long thread : threads) {
      end.held.insert(thread);
      if (thread != caller && end.users.count(thread)) end.leaves_at_once = true;
    }
  }
  end.held.erase(caller);
  end.began.store(true, std::memory_order_release);
  end.terminate = std::set_terminate(terminate_or_sleep);
#ifdef __GLIBC__
  on_exit(leave, nullptr); // the last to be registered comes first
#endif
}

void stop_if_ending() {
  if (C10_LIKELY(!exit_has_begun()) || locks > 0 || !is_held()) return;
  if (PyGILState_Check()) PyEval_SaveThread();
  sleep_for_ever();
}

// -- the GIL and locks --------------------------------------------------------------------------

WithoutGil::WithoutGil() {
  if (PyGILState_Check()) state_ = PyEval_SaveThread();
}
WithoutGil::~WithoutGil() {
  if (!state_) return;
  stop_if_ending();
  without_unwinding([&] { PyEval_RestoreThread(static_cast<PyThreadState*>(state_)); });
}

bind::WithGil::WithGil() {
  stop_if_ending();
  state_ = without_unwinding([] { return PyGILState_Ensure(); });
}

// A thread with a lock never sleeps at the end: the main thread may want the lock.
Held::Held(std::recursive_mutex& mutex) : mutex_(mutex) {
  locks++;
  if (mutex.try_lock()) return;
  WithoutGil free;
  mutex.lock();
}
Held::~Held() {
  mutex_.unlock();
  if (--locks == 0) stop_if_ending();
}

// -- waits after the main thread ----------------------------------------------------------------

bool main_thread_has_ended() {
  if (!python_is_there() || PyGILState_GetThisThreadState() == nullptr) return false;
  bind::WithGil gil;
  return bind::From<bool>::load(bind::call_method(exit_module(), "main_thread_has_ended").get());
}

LastWait::LastWait(std::function<bool()> stuck) {
  bind::WithGil gil;
  const bind::Ref question(bind::wrap(std::move(stuck)));
  PyObject* ask = bind::Ref(PyObject_GetAttrString(question.get(), "ask")).release();
  last_ = bind::call_method(exit_module(), "LastWait", ask).release();
  bind::call_method(last_, "__enter__");
}

LastWait::~LastWait() {
  if (!python_is_there()) return; // the thread ends with the process
  bind::WithGil gil;
  const bind::Ref last(last_);
  const bind::Ref none(Py_BuildValue("OOO", Py_None, Py_None, Py_None));
  const bind::Ref leave(PyObject_GetAttrString(last_, "__exit__"));
  bind::Ref(PyObject_CallObject(leave.get(), none.get()));
}

bool LastWait::in_vain() {
  bind::WithGil gil;
  return bind::From<bool>::load(bind::call_method(last_, "in_vain").get());
}

} // namespace neuron
