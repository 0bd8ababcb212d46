#pragma once

#include <c10/util/Exception.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>
#include <string>
#include <system_error>

namespace qkv::nn {

/// A file that is there once it is whole. Until done() it has another name in the same folder, and
/// what has its own name stays. What is there and no regular file, as a pipe or a link to nothing,
/// is written to; so is a file in whose folder there can be no other.
///
/// Without std::filesystem: libtorch.so exports one of its own, which a program may get, and crash.
class WholeFile {
 public:
  /// `function` is whose errors these are.
  WholeFile(const char* function, const std::string& path)
      : function_(function), path_(path), target_(path), written_(path) {
    struct stat there, link;
    const bool replaces = ::stat(path.c_str(), &there) == 0 && S_ISREG(there.st_mode);
    if (replaces) {
      check(::access(path.c_str(), W_OK) == 0);
      char* led_to = ::realpath(path.c_str(), nullptr);  // so that a link stays one
      check(led_to != nullptr);
      target_ = led_to;
      std::free(led_to);
    }
    if (replaces || ::lstat(path.c_str(), &link) != 0) {
      written_ = c10::str(target_, '.', std::random_device()(), ".part");
    }
    stream_.open(written_, std::ios::binary);
    if (!stream_.is_open() && replaces) stream_.open(written_ = target_, std::ios::binary);
    check(stream_.is_open());
    if (written_ != target_ && replaces) ::chmod(written_.c_str(), there.st_mode & 07777);
  }

  WholeFile(const WholeFile&) = delete;
  WholeFile& operator=(const WholeFile&) = delete;

  ~WholeFile() {
    if (written_ != target_) std::remove(written_.c_str());
  }

  void write(const void* data, size_t size) {
    if (error_ == 0 && !stream_.write(static_cast<const char*>(data), size)) error_ = errno;
  }

  void done() {
    errno = error_;
    check(error_ == 0);
    stream_.close();
    check(stream_.good());
    if (written_ == target_) return;
    check(std::rename(written_.c_str(), target_.c_str()) == 0);
    written_ = target_;
  }

 private:
  void check(bool good) const {
    TORCH_CHECK_VALUE(good, function_, ": cannot write ", path_, ": ",
                      std::generic_category().message(errno));
  }

  const char* function_;
  std::string path_, target_, written_;  // as given, where it leads to, and what it is until then
  std::ofstream stream_;
  int error_ = 0;  // of the first write that failed
};

}  // namespace qkv::nn
