#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include "gyre_test.h"

namespace gyre::test {

// Exits with what `child` returns, 0: as promised.
inline void expect_child(const std::function<int()>& child) {
  const pid_t pid = fork();
  if (pid == 0) {
    alarm(120);  // instead of a hang
    _exit(child());
  }
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  ASSERT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status)
                                 << (WTERMSIG(status) == SIGALRM ? ": it hung" : "");
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace gyre::test
