// octavo_gpu_bench [--json FILE] [--backend NAME] [--no-limit] [--list] [--works FILE] [WORK ...]
//
// Measures decode rows (work.h has their names) and the read limit of the device they stand against. --works: a file
// with a name a line; --list: say what would be measured, which needs no GPU. Exit status 1: a row failed or is wrong.
// bench/gpu/run.py makes the table of ours and the peers' from this.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <exception>
#include <fstream>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include "decode.h"
#include "read_limit.h"
#include "work.h"

namespace octavo::bench {
namespace {

struct Options {
  std::string json, backend;
  bool limit = true, list = false;
  std::vector<std::string> names;
};

Options parse_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    const auto value = [&] {
      if (++i == argc) throw std::invalid_argument(std::string(argument) + " needs a value");
      return std::string(argv[i]);
    };
    if (argument == "--json") {
      options.json = value();
    } else if (argument == "--backend") {
      options.backend = value();
    } else if (argument == "--no-limit") {
      options.limit = false;
    } else if (argument == "--list") {
      options.list = true;
    } else if (argument == "--works") {
      const std::string file = value();
      std::ifstream lines(file);
      if (!lines) throw std::invalid_argument("--works: cannot read " + file);
      for (std::string line; std::getline(lines, line);) {
        if (!line.empty()) options.names.push_back(line);
      }
    } else if (argument.starts_with("--")) {
      throw std::invalid_argument("no option " + std::string(argument));
    } else {
      options.names.emplace_back(argument);
    }
  }
  return options;
}

std::string quoted(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return result + "\"";
}

template <typename... Values>
std::string print(const char* format, Values... values) {
  std::string text(512, '\0');
  const int length = std::snprintf(text.data(), text.size(), format, values...);
  text.resize(static_cast<std::size_t>(length));
  return text;
}

std::string to_json(const std::string& work, const Result& r) {
  return "{\"work\": " + quoted(work) + ", \"backend\": " + quoted(r.backend) +
         print(
             ", \"ours_us\": %.2f, \"ours_us_range\": [%.2f, %.2f], \"call_us\": %.2f, \"call_us_range\": [%.2f, %.2f]",
             r.attention.median, r.attention.least, r.attention.most, r.call.median, r.call.least, r.call.most) +
         print(", \"bytes\": %lld, \"error\": %.2g, \"worst_row_error\": %.2g, \"kernels\": [%zu, %zu]",
               static_cast<long long>(r.bytes), r.error, r.worst_error, r.attention_kernels, r.call_kernels) +
         print(", \"caches\": %zu, \"calls\": %zu}", r.caches, r.calls);
}

void append(std::string& list, const std::string& item) {
  list += (list.empty() ? "\n  " : ",\n  ") + item;
}

int run(const Options& options) {
  std::vector<Work> works;
  for (const std::string& name : options.names) works.push_back(parse_work(name));
  if (options.list) {
    for (const Work& work : works) {
      std::printf("%-50s %12lld bytes\n", work.name.c_str(), static_cast<long long>(work.bytes()));
    }
    return 0;
  }
  int device = 0;
  cudaDeviceProp properties{};
  check(cudaGetDevice(&device), "device");
  check(cudaGetDeviceProperties(&properties, device), "device");
  const Stream stream;

  std::string limits, rows;
  if (options.limit) {
    for (const ReadTime& read : measure_reads(stream)) {
      std::printf("read %5lld MiB %46.2f us  %5.2f TB/s  %s\n", static_cast<long long>(read.bytes >> 20),
                  read.microseconds, static_cast<double>(read.bytes) / read.microseconds / 1e6, read.shape.c_str());
      append(limits, print("{\"bytes\": %lld, \"us\": %.2f, \"kernel\": ", static_cast<long long>(read.bytes),
                           read.microseconds) +
                         quoted(read.shape) + "}");
    }
  }
  bool ok = true;
  for (const Work& work : works) {
    try {
      const Result r = measure(work, options.backend, stream);
      std::printf("%-50s attn %9.2f us  call %9.2f us  %5.2f TB/s  error %.1e  %s\n", work.name.c_str(),
                  r.attention.median, r.call.median, static_cast<double>(r.bytes) / r.attention.median / 1e6, r.error,
                  r.backend.c_str());
      append(rows, to_json(work.name, r));
    } catch (const std::exception& error) {
      ok = false;
      std::printf("%-50s FAILED: %s\n", work.name.c_str(), error.what());
      append(rows, "{\"work\": " + quoted(work.name) + ", \"failure\": " + quoted(error.what()) + "}");
    }
    std::fflush(stdout);
  }
  if (!options.json.empty()) {
    std::ofstream file(options.json);
    file << "{\"device\": " << quoted(properties.name) << ",\n\"limit\": [" << limits << "],\n\"rows\": [" << rows
         << "]}\n";
    if (!file.flush()) throw std::runtime_error("cannot write " + options.json);
  }
  return ok ? 0 : 1;
}

}  // namespace
}  // namespace octavo::bench

int main(int argc, char** argv) {
  try {
    return octavo::bench::run(octavo::bench::parse_options(argc, argv));
  } catch (const std::exception& error) {
    std::cerr << "octavo_gpu_bench: " << error.what() << "\n";
    return 1;
  }
}
