#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <vector>

#include "implementation.hpp"

namespace specrt::fake {

class FakeRun : public Run {
 public:
  FakeRun(const Prompt& prompt, const Params& params, std::atomic<int>& occupied);
  ~FakeRun() override;

  bool next(Chunk& chunk) override;
  void cancel() noexcept override;
  Stats stats() override;
  std::string json() override;

 private:
  bool second(Chunk& chunk);
  bool block();
  void process();

  Params params_;
  std::string order_;
  std::vector<Token> ids_;
  std::size_t chunks_ = 0;  // how many there will be
  std::size_t told_ = 0;
  bool over_ = false;
  std::atomic<int>& occupied_;
  std::atomic<bool> inside_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool cancelled_ = false;
};

}  // namespace specrt::fake
