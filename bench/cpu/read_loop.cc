// A plain read of memory with a fixed number of threads: the limit that decode is held against. Built by read_loop.py.
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace {

constexpr std::size_t kPieceBytes = 64 * 1024;  // what a thread takes at a time, so that a late one delays little
constexpr std::size_t kLanes = 32;              // independent words: enough registers to keep every load unit busy

// The words of one piece, or-ed together: the cheapest use that the compiler may not drop.
std::uint64_t read_piece(const std::uint64_t* words, std::size_t count) {
  std::uint64_t lanes[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) lanes[lane] |= words[i + lane];
  }
  std::uint64_t all = 0;
  for (; i < count; ++i) all |= words[i];
  for (const std::uint64_t lane : lanes) all |= lane;
  return all;
}

// Threads that wait between reads; the caller is one of them.
class Reader {
 public:
  explicit Reader(int threads) {
    for (int i = 1; i < threads; ++i) helpers_.emplace_back([this] { help(); });
  }

  ~Reader() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    start_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
  }

  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  std::uint64_t read(const std::uint64_t* words, std::size_t count) {
    {
      const std::lock_guard lock(mutex_);
      words_ = words;
      count_ = count;
      next_ = 0;
      all_ = 0;
      busy_ = helpers_.size();
      ++generation_;
    }
    start_.notify_all();
    take_pieces();
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
    return all_;
  }

 private:
  void take_pieces() {
    constexpr std::size_t kPiece = kPieceBytes / sizeof(std::uint64_t);
    std::uint64_t all = 0;
    for (std::size_t begin; (begin = next_.fetch_add(kPiece)) < count_;) {
      all |= read_piece(words_ + begin, count_ - begin < kPiece ? count_ - begin : kPiece);
    }
    all_ |= all;
  }

  void help() {
    std::uint64_t seen = 0;
    for (;;) {
      {
        std::unique_lock lock(mutex_);
        start_.wait(lock, [&] { return stopping_ || generation_ != seen; });
        if (stopping_) return;
        seen = generation_;
      }
      take_pieces();
      const std::lock_guard lock(mutex_);
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable start_, done_;
  std::uint64_t generation_ = 0;
  std::size_t busy_ = 0;
  bool stopping_ = false;
  const std::uint64_t* words_ = nullptr;
  std::size_t count_ = 0;
  std::atomic<std::size_t> next_ = 0;
  std::atomic<std::uint64_t> all_ = 0;
  std::vector<std::thread> helpers_;
};

}  // namespace

extern "C" {

void* octavo_reader_create(int threads) {
  return new Reader(threads);
}

void octavo_reader_destroy(void* reader) {
  delete static_cast<Reader*>(reader);
}

std::uint64_t octavo_reader_read(void* reader, const std::uint64_t* words, std::size_t count) {
  return static_cast<Reader*>(reader)->read(words, count);
}
}
