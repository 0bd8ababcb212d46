// Times every point of a grid: attention_benchmark POINTS.json [--benchmark_..]. One line of JSON a
// point goes to standard output: {"name": .., "seconds": {system: [of each turn]}}, and of second
// order "bytes": {system: added at its peak by one call from the beginning, with all it leaves}.
//
// Google Benchmark calibrates, repeats and shuffles: of one point, all systems and the limits of
// the machine take turns in random order (--benchmark_enable_random_interleaving).

#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>

#include <fstream>
#include <iostream>

#include "memory.h"
#include "point.h"

namespace {

/// Keeps the time of every repetition, in seconds, by the benchmark's name.
class Collector : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context&) override { return true; }

  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) {
      if (run.run_type != Run::RT_Iteration) continue;
      const auto iterations = static_cast<double>(run.iterations);
      seconds[run.run_name.function_name].push_back(run.real_accumulated_time / iterations);
    }
  }

  std::map<std::string, std::vector<double>> seconds;
};

nlohmann::json measure(const nlohmann::json& json) {
  at::set_num_threads(json.at("threads"));
  const Point point(json);
  const auto systems = point.systems();
  for (const auto& [name, system] : systems) {
    auto run = system;
    run();  // once untimed: graphs that backwards go through are built, and pages are there
    benchmark::RegisterBenchmark(name.c_str(), [run](benchmark::State& state) mutable {
      for (auto _ : state) run();
    })->UseRealTime();
  }
  Collector collector;
  benchmark::RunSpecifiedBenchmarks(&collector);
  benchmark::ClearRegisteredBenchmarks();  // and their graphs
  nlohmann::json found = {{"name", json.at("name")}, {"seconds", collector.seconds}};
  if (systems.contains("first_order")) {
    for (const auto* name : {"qkv", "math"}) {
      if (!systems.contains(name)) continue;
      // A copy, which has run nothing yet.
      const auto bytes = memory::added_by(std::function<void()>(systems.at(name)));
      if (bytes) found["bytes"][name] = *bytes;
    }
  }
  return found;
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (argc != 2) {
    std::cerr << "usage: attention_benchmark POINTS.json [--benchmark_..]\n";
    return 2;
  }
  const auto points = nlohmann::json::parse(std::ifstream(argv[1]));
  for (const auto& point : points) std::cout << measure(point) << std::endl;
}
