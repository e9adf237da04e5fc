// Work spread over threads.

#pragma once

#include <atomic>
#include <cstdint>

namespace {

// Run `body` for each number below `count`, some at a time for each thread, with the number of the thread.
//
// The call says how many threads there are, and which function runs them: OpenMP's, or null.
template <class Call, class Body> void for_each(const Call &c, int64_t count, Body body) {
  struct Work {
    Body &body;
    int64_t count, some;
    std::atomic<int64_t> next, threads;
    static void run(void *data) {
      Work &work = *(Work *)data;
      const int64_t thread = work.threads.fetch_add(1);
      for (int64_t first; (first = work.next.fetch_add(work.some)) < work.count;)
        for (int64_t i = first; i < first + work.some && i < work.count; ++i) work.body(i, thread);
    }
  };
  const int64_t pieces = 8 * c.threads;  // so many that a thread that is held up leaves its share to the others
  Work work{body, count, (count + pieces - 1) / pieces, {0}, {0}};
  if (c.threads > 1 && count > 1 && c.parallel) c.parallel(Work::run, &work, (unsigned)c.threads, 0);
  else Work::run(&work);
}

}  // namespace
