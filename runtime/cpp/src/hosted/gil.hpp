// Python's lock, and what Python knows of the threads that take it.
#pragma once

namespace specrt::hosted {

// Python's lock, held while this lives. Throws Failure where no interpreter can be entered.
class Gil {
 public:
  Gil();
  ~Gil();
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  int before_;
};

}  // namespace specrt::hosted
