#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <optional>
#include <thread>

#include "weft/comm/local/links.h"
#include "weft/comm/local/shared_state.h"
#include "weft/core/error.h"

namespace weft::local {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr uint32_t kMagic = 0x57454654;  // "WEFT"

/// First packet of the rank that connects, and the answer.
struct Hello {
  uint32_t magic = kMagic;
  uint32_t layout = kLayoutVersion;
  int32_t rank = -1;
  int32_t size = 0;
};

/// Head of every later packet; the key and the error text follow.
struct Header {
  uint64_t bytes = 0;
  uint64_t number = 0;
  uint64_t segment_bytes = 0;
  uint32_t key_length = 0;
  uint32_t error_length = 0;
};
constexpr size_t kPacketLimit = 16 << 10;  // bytes; keys and texts are cut to fit

std::pair<sockaddr_un, socklen_t> address_of(const std::string& key, int rank) {
  // A leading NUL makes the name abstract: it vanishes with the socket. The hash keeps any key within 107 bytes.
  const std::string name = fmt::format("weft-{}-{:016x}-{}", ::getuid(), std::hash<std::string>{}(key), rank);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
}

UniqueFd new_socket() {
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw ConfigError(fmt::format("cannot open a Unix socket: {}; raise ulimit -n", std::strerror(errno)));
  return fd;
}

bool wait_for(int fd, short events, milliseconds patience) {
  pollfd entry{fd, events, 0};
  return ::poll(&entry, 1, static_cast<int>(patience.count())) > 0;
}

void check_same_user(int fd) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0 || peer.uid != ::getuid()) {
    throw ConfigError(fmt::format("a process of user {} answered on this job's socket; ranks of one machine must belong to one user",
                                  peer.uid));
  }
}

class SocketLinks : public Links {
 public:
  explicit SocketLinks(int size) : sockets_(static_cast<size_t>(size)) {}

  void set(int peer, UniqueFd fd) { sockets_[static_cast<size_t>(peer)] = std::move(fd); }
  bool has(int peer) const { return static_cast<bool>(sockets_[static_cast<size_t>(peer)]); }

  bool send(int peer, const Parcel& parcel) override;
  bool receive(int peer, milliseconds patience, Parcel& parcel) override;
  RankSet closed() override;
  bool separate_mappings() const override { return true; }

 private:
  int fd(int peer) const { return sockets_[static_cast<size_t>(peer)].get(); }
  std::vector<UniqueFd> sockets_;  // none for this rank
};

bool SocketLinks::send(int peer, const Parcel& parcel) {
  const std::string key = parcel.key.substr(0, kPacketLimit / 4);
  const std::string error = parcel.error.substr(0, kPacketLimit / 4);
  Header header{parcel.bytes, parcel.number, parcel.segment ? parcel.segment->size() : 0, static_cast<uint32_t>(key.size()),
                static_cast<uint32_t>(error.size())};
  iovec parts[] = {{&header, sizeof(header)},
                   {const_cast<char*>(key.data()), key.size()},
                   {const_cast<char*>(error.data()), error.size()}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 3;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (parcel.segment) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* item = CMSG_FIRSTHDR(&message);
    item->cmsg_level = SOL_SOCKET;
    item->cmsg_type = SCM_RIGHTS;
    item->cmsg_len = CMSG_LEN(sizeof(int));
    const int handed = parcel.segment->fd();
    std::memcpy(CMSG_DATA(item), &handed, sizeof(int));
  }
  if (::sendmsg(fd(peer), &message, MSG_NOSIGNAL) >= 0) return true;
  // ETOOMANYREFS: more descriptors in flight than the user may have; they drain as the peers receive.
  if (errno == EAGAIN || errno == EINTR || errno == ENOBUFS || errno == ETOOMANYREFS) return false;
  if (errno == EPIPE || errno == ECONNRESET) return true;  // gone; closed() tells
  throw InternalError(fmt::format("cannot hand shared memory to rank {}: {}", peer, std::strerror(errno)));
}

bool SocketLinks::receive(int peer, milliseconds patience, Parcel& parcel) {
  if (!wait_for(fd(peer), POLLIN, patience)) return false;
  std::vector<char> buffer(kPacketLimit);
  iovec part{buffer.data(), buffer.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t length = ::recvmsg(fd(peer), &message, MSG_CMSG_CLOEXEC);
  if (length <= 0) return false;  // end of file, or taken back
  UniqueFd handed;
  if (cmsghdr* item = CMSG_FIRSTHDR(&message); item && item->cmsg_type == SCM_RIGHTS) {
    int raw;
    std::memcpy(&raw, CMSG_DATA(item), sizeof(int));
    handed = UniqueFd(raw);
  }
  Header header;
  if (static_cast<size_t>(length) < sizeof(header)) throw InternalError("short packet from a peer");
  std::memcpy(&header, buffer.data(), sizeof(header));
  if (static_cast<size_t>(length) != sizeof(header) + header.key_length + header.error_length) {
    throw InternalError("malformed packet from a peer");
  }
  const char* text = buffer.data() + sizeof(header);
  parcel.key.assign(text, header.key_length);
  parcel.error.assign(text + header.key_length, header.error_length);
  parcel.bytes = header.bytes;
  parcel.number = header.number;
  parcel.segment = nullptr;
  if (header.segment_bytes > 0) {
    if (!handed) throw ConfigError("could not take over shared memory from a peer: out of file descriptors; raise ulimit -n");
    parcel.segment = Segment::attach(std::move(handed), header.segment_bytes);
  }
  return true;
}

RankSet SocketLinks::closed() {
  std::vector<pollfd> entries;
  std::vector<size_t> peers;
  for (size_t p = 0; p < sockets_.size(); ++p) {
    if (!sockets_[p]) continue;
    entries.push_back({sockets_[p].get(), POLLRDHUP, 0});
    peers.push_back(p);
  }
  RankSet gone;
  if (::poll(entries.data(), entries.size(), 0) <= 0) return gone;
  for (size_t i = 0; i < entries.size(); ++i) {
    if (entries[i].revents & (POLLHUP | POLLRDHUP | POLLERR)) gone.set(peers[i]);
  }
  return gone;
}

/// One rank's part in connecting everybody with everybody: it listens for higher ranks and calls lower ones.
class Rendezvous {
 public:
  Rendezvous(const std::string& key, int rank, int size, milliseconds timeout)
      : key_(key), rank_(rank), size_(size), start_(Clock::now()), deadline_(start_ + timeout),
        links_(std::make_unique<SocketLinks>(size)) {}

  std::unique_ptr<Links> run() {
    if (rank_ + 1 < size_) listen();
    for (int lower = 0; lower < rank_; ++lower) call(lower);
    while (connected_ + 1 < size_) accept_one();
    return std::move(links_);
  }

 private:
  void check_time() const {
    if (Clock::now() < deadline_) return;
    std::vector<int> missing;
    for (int r = 0; r < size_; ++r) {
      if (r != rank_ && !links_->has(r)) missing.push_back(r);
    }
    throw CommError({.rank = rank_, .group = "world", .op = "join", .peers = missing,
                     .elapsed = std::chrono::duration_cast<milliseconds>(Clock::now() - start_),
                     .cause = fmt::format("rank{} {} did not come in time", missing.size() > 1 ? "s" : "", fmt::join(missing, ", "))});
  }

  void listen() {
    const auto [address, length] = address_of(key_, rank_);
    listener_ = new_socket();
    // In use: the same rank of a run that is just ending (a restart), or a second job with this key.
    while (::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
      if (errno != EADDRINUSE) throw ConfigError(fmt::format("cannot bind a Unix socket: {}", std::strerror(errno)));
      if (Clock::now() >= deadline_) {
        throw ConfigError(fmt::format("another process is rank {} of a job with key '{}'; give this job another port or run id", rank_, key_));
      }
      std::this_thread::sleep_for(kRetry);
    }
    ::listen(listener_.get(), size_);
  }

  void call(int peer) {
    const auto [address, length] = address_of(key_, peer);
    UniqueFd fd = new_socket();
    while (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
      check_time();
      std::this_thread::sleep_for(kRetry);  // the peer does not listen yet, or its queue is full
      fd = new_socket();
    }
    check_same_user(fd.get());
    const Hello mine{.rank = rank_, .size = size_};
    ::send(fd.get(), &mine, sizeof(mine), MSG_NOSIGNAL);
    const std::optional<Hello> answer = read_hello(fd.get());
    check_hello(answer, peer);
    links_->set(peer, std::move(fd));
    ++connected_;
  }

  void accept_one() {
    while (!wait_for(listener_.get(), POLLIN, kSlice)) check_time();
    UniqueFd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) return;
    check_same_user(fd.get());
    const std::optional<Hello> theirs = read_hello(fd.get());
    const Hello mine{.rank = rank_, .size = size_};
    ::send(fd.get(), &mine, sizeof(mine), MSG_NOSIGNAL);
    if (!theirs) return;  // it went away again
    check_hello(theirs, theirs->rank);
    if (theirs->rank <= rank_ || theirs->rank >= size_ || links_->has(theirs->rank)) {
      throw ConfigError(fmt::format("two processes are rank {} of the job with key '{}'; each rank must be started once", theirs->rank, key_));
    }
    links_->set(theirs->rank, std::move(fd));
    ++connected_;
  }

  std::optional<Hello> read_hello(int fd) const {
    while (!wait_for(fd, POLLIN, kSlice)) check_time();
    Hello hello;
    if (::recv(fd, &hello, sizeof(hello), 0) != static_cast<ssize_t>(sizeof(hello))) return std::nullopt;
    return hello;
  }

  void check_hello(const std::optional<Hello>& hello, int peer) const {
    if (!hello) {
      throw CommError({.rank = rank_, .group = "world", .op = "join", .peers = {peer},
                       .elapsed = std::chrono::duration_cast<milliseconds>(Clock::now() - start_),
                       .cause = fmt::format("rank {} ended while the ranks were joining", peer)});
    }
    if (hello->magic != kMagic || hello->layout != kLayoutVersion) {
      throw ConfigError(fmt::format("rank {} runs another version of this program; start the same binary on all ranks", peer));
    }
    if (hello->size != size_) {
      throw ConfigError(fmt::format("rank {} was started for {} ranks, rank {} for {}; start all ranks with the same size", rank_,
                                    size_, hello->rank, hello->size));
    }
  }

  static constexpr milliseconds kRetry{2};
  static constexpr milliseconds kSlice{20};

  const std::string& key_;
  int rank_;
  int size_;
  Clock::time_point start_;
  Clock::time_point deadline_;
  UniqueFd listener_;
  std::unique_ptr<SocketLinks> links_;
  int connected_ = 0;
};

}  // namespace

std::unique_ptr<Links> socket_links(const std::string& key, int rank, int size, milliseconds timeout) {
  return Rendezvous(key, rank, size, timeout).run();
}

}  // namespace weft::local
