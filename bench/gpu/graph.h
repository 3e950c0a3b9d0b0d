// CUDA graphs: capture, kernels taken out, replays timed.
#pragma once

#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "device.h"

namespace octavo::bench {

class Graph {
 public:
  static Graph capture(const Stream& stream, const std::function<void()>& work);
  Graph(Graph&& other) noexcept
      : graph_(std::exchange(other.graph_, nullptr)), executable_(std::exchange(other.executable_, nullptr)) {}
  Graph& operator=(Graph&&) = delete;
  ~Graph();

  // The same graph without the kernels whose (mangled) name contains one of `names`: their successors follow their
  // predecessors. An edge over a gap stays a programmatic one (launched early) only if both edges at the kernel were.
  Graph without(std::span<const std::string_view> names) const;

  std::size_t kernels() const;
  void launch(const Stream& stream) const { check(cudaGraphLaunch(executable_, stream), "graph launch"); }

 private:
  explicit Graph(cudaGraph_t graph);
  std::vector<cudaGraphNode_t> kernel_nodes() const;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

struct Times {
  double median = 0.0, least = 0.0, most = 0.0;  // us of one replay
};

// Replays the graphs in turn, back to back (so that no replay waits for its launch), and times each. Warms up first;
// between 5 and 15 replays each, as many as fit into `budget` us.
std::vector<Times> time_replays(const Stream& stream, const std::vector<const Graph*>& graphs, double budget = 150e3);

}  // namespace octavo::bench
