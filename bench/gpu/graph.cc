#include "graph.h"

#include <algorithm>
#include <string>

namespace octavo::bench {
namespace {

struct Neighbours {
  std::vector<cudaGraphNode_t> nodes;
  std::vector<cudaGraphEdgeData> edges;
};

// `query` is cudaGraphNodeGetDependencies or cudaGraphNodeGetDependentNodes.
template <typename Query>
Neighbours neighbours(Query query, cudaGraphNode_t node) {
  std::size_t count = 0;
  check(query(node, nullptr, nullptr, &count), "graph edges");
  Neighbours found{std::vector<cudaGraphNode_t>(count), std::vector<cudaGraphEdgeData>(count)};
  if (count > 0) check(query(node, found.nodes.data(), found.edges.data(), &count), "graph edges");
  return found;
}

bool programmatic(const cudaGraphEdgeData& edge) {
  return edge.type == cudaGraphDependencyTypeProgrammatic;
}

void take_out(cudaGraph_t graph, cudaGraphNode_t node) {
  const Neighbours before = neighbours(cudaGraphNodeGetDependencies, node);
  const Neighbours after = neighbours(cudaGraphNodeGetDependentNodes, node);
  check(cudaGraphDestroyNode(node), "removal of a graph node");
  for (std::size_t i = 0; i < before.nodes.size(); ++i) {
    for (std::size_t j = 0; j < after.nodes.size(); ++j) {
      cudaGraphEdgeData edge{};
      if (programmatic(before.edges[i]) && programmatic(after.edges[j])) edge = before.edges[i];
      check(cudaGraphAddDependencies(graph, &before.nodes[i], &after.nodes[j], &edge, 1), "graph edge");
    }
  }
}

class Event {
 public:
  Event() { check(cudaEventCreate(&event_), "event"); }
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&&) = delete;
  ~Event() {
    if (event_ != nullptr) cudaEventDestroy(event_);
  }
  void record(const Stream& stream) const { check(cudaEventRecord(event_, stream), "event"); }
  double microseconds_since(const Event& earlier) const {
    float ms = 0.0f;
    check(cudaEventElapsedTime(&ms, earlier.event_, event_), "event");
    return 1000.0 * static_cast<double>(ms);
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// times[g] are those of graph g, us.
std::vector<std::vector<double>> replay(const Stream& stream, const std::vector<const Graph*>& graphs, int rounds) {
  std::vector<Event> events(graphs.size() * static_cast<std::size_t>(rounds) + 1);
  std::size_t at = 0;
  events[at].record(stream);
  for (int round = 0; round < rounds; ++round) {
    for (const Graph* graph : graphs) {
      graph->launch(stream);
      events[++at].record(stream);
    }
  }
  stream.synchronize("replays");
  std::vector<std::vector<double>> times(graphs.size());
  for (std::size_t i = 0; i < at; ++i) times[i % graphs.size()].push_back(events[i + 1].microseconds_since(events[i]));
  return times;
}

}  // namespace

Graph::Graph(cudaGraph_t graph) : graph_(graph) {
  check(cudaGraphInstantiate(&executable_, graph_, 0), "graph instantiation");
}

Graph::~Graph() {
  if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
  if (graph_ != nullptr) cudaGraphDestroy(graph_);
}

Graph Graph::capture(const Stream& stream, const std::function<void()>& work) {
  cudaGraph_t graph = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  try {
    work();
  } catch (...) {
    cudaStreamEndCapture(stream, &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    throw;
  }
  check(cudaStreamEndCapture(stream, &graph), "capture");
  return Graph(graph);
}

std::vector<cudaGraphNode_t> Graph::kernel_nodes() const {
  std::size_t count = 0;
  check(cudaGraphGetNodes(graph_, nullptr, &count), "graph nodes");
  std::vector<cudaGraphNode_t> nodes(count);
  check(cudaGraphGetNodes(graph_, nodes.data(), &count), "graph nodes");
  std::erase_if(nodes, [](cudaGraphNode_t node) {
    cudaGraphNodeType type{};
    check(cudaGraphNodeGetType(node, &type), "type of a graph node");
    return type != cudaGraphNodeTypeKernel;
  });
  return nodes;
}

std::size_t Graph::kernels() const {
  return kernel_nodes().size();
}

Graph Graph::without(std::span<const std::string_view> names) const {
  cudaGraph_t copy = nullptr;
  check(cudaGraphClone(&copy, graph_), "copy of a graph");
  for (const cudaGraphNode_t node : kernel_nodes()) {
    cudaKernelNodeParams parameters{};
    check(cudaGraphKernelNodeGetParams(node, &parameters), "kernel of a graph node");
    const char* name = nullptr;
    check(cudaFuncGetName(&name, parameters.func), "name of a kernel");
    const std::string_view kernel(name);
    const auto matches = [kernel](std::string_view part) { return kernel.find(part) != std::string_view::npos; };
    if (std::none_of(names.begin(), names.end(), matches)) continue;
    cudaGraphNode_t in_copy = nullptr;
    check(cudaGraphNodeFindInClone(&in_copy, node, copy), "graph node in the copy");
    take_out(copy, in_copy);
  }
  return Graph(copy);
}

std::vector<Times> time_replays(const Stream& stream, const std::vector<const Graph*>& graphs, double budget) {
  double round = 0.0;
  for (const std::vector<double>& times : replay(stream, graphs, 2)) round += times.back();
  const auto fits = [round](double time, int least, int most) {
    return static_cast<int>(std::clamp(time / round, static_cast<double>(least), static_cast<double>(most)));
  };
  replay(stream, graphs, fits(budget / 15.0, 1, 20));
  std::vector<Times> result;
  // The first replay of the timed ones waits for its launch, and is not counted.
  for (std::vector<double>& times : replay(stream, graphs, 1 + fits(budget, 5, 15))) {
    times.erase(times.begin());
    std::sort(times.begin(), times.end());
    result.push_back({times[times.size() / 2], times.front(), times.back()});
  }
  return result;
}

}  // namespace octavo::bench
