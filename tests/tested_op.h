#pragma once
// An op that op_test walks, registered where its file is linked: CMake links every */*_op.cpp.

#include "gyre_test.h"
#include "op_case.h"

namespace gyre::test {

class TestedOp {
 public:
  TestedOp(std::string op, std::vector<OpCase> (*cases)(), std::vector<Refusal> (*refusals)()) {
    all().push_back({std::move(op), cases, refusals});
  }
  static std::vector<OpCases>& all() {
    static std::vector<OpCases> ops;
    return ops;
  }
};

}  // namespace gyre::test
