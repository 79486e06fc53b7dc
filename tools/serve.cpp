// quern serve: listens at once, loads the checkpoint, answers until a signal comes.
#include <pthread.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <thread>

#include "ggml-like/check.h"
#include "models/model.h"
#include "tools/commands.h"
#include "tools/common/cli_values.h"
#include "tools/common/doctor/command.h"
#include "tools/common/load_replicas.h"
#include "tools/serve/api.h"
#include "tools/serve/options.h"

namespace quern {
namespace {

constexpr double kLastWords = 1;  // seconds, for replies that are being written

sigset_t ending_signals() {
    sigset_t set;
    sigemptyset(&set);
    for (const int s : {SIGINT, SIGTERM, SIGHUP}) sigaddset(&set, s);
    return set;
}

/// Waits for signals: the first drains, the second ends the process. All other threads have them blocked.
class SignalThread {
  public:
    SignalThread(Api& api, Replicas& replicas, double drain_seconds)
        : thread_([this, &api, &replicas, drain_seconds] {
              const sigset_t set = ending_signals();
              int signal = 0;
              sigwait(&set, &signal);
              if (done_) return;
              if (!serving_) ::_exit(128 + signal);
              std::fputs("quern: draining; again to stop at once\n", stderr);
              api.set_draining();
              const auto end = Job::Clock::now() + std::chrono::duration<double>(drain_seconds);
              bool stopped = false;
              while (!done_) {  // states are saved after the drain, which may take a while, too
                  if (!stopped && (replicas.queue().busy() == 0 || Job::Clock::now() >= end)) {
                      replicas.stop();
                      stopped = true;
                  }
                  const timespec moment{.tv_sec = 0, .tv_nsec = 50'000'000};
                  const int second = sigtimedwait(&set, nullptr, &moment);
                  if (second > 0 && !done_) ::_exit(128 + second);
              }
          }) {}
    ~SignalThread() {
        done_ = true;
        pthread_kill(thread_.native_handle(), SIGTERM);
        thread_.join();
    }
    /// From now on a signal drains.
    void serving() { serving_ = true; }

  private:
    std::atomic<bool> done_ = false, serving_ = false;
    std::thread thread_;
};

void announce(const ServeOptions& o, const Engine& engine, int port) {
    const bool ipv6 = o.host.find(':') != std::string::npos;
    const std::string times = o.replicas > 1 ? std::to_string(o.replicas) + " x " : "";
    std::fprintf(stderr, "quern: %s on %s%s, %s%ld answers at a time, context %ld, at http://%s%s%s:%d\n",
                 engine.model().info().name.c_str(), times.c_str(), engine.backend().name().c_str(),
                 times.c_str(), static_cast<long>(engine.sequences()), static_cast<long>(engine.context()),
                 ipv6 ? "[" : "", o.host.c_str(), ipv6 ? "]" : "", port);
}

void restore_states(const std::string& directory, const LoadedReplicas& loaded, Replicas& replicas) {
    Engine& engine = *loaded.list.front().engine;
    for (const LoadedModel& other : loaded.list) other.engine->name_directory(directory);
    const std::string remark = engine.load_states(directory);
    if (!remark.empty()) std::fprintf(stderr, "quern: %s\n", printable(remark, 500).c_str());
    const PrefixCacheStats stats = engine.cache_stats();
    std::fprintf(stderr, "quern: %ld states of earlier prompts from %s, %ld MiB\n",
                 static_cast<long>(stats.snapshots), printable(directory, 200).c_str(),
                 static_cast<long>(stats.bytes >> 20));
    replicas.keep_states();
}

std::vector<Replicas::One> engines_of(const LoadedReplicas& loaded) {
    std::vector<Replicas::One> list;
    for (size_t r = 0; r < loaded.list.size(); ++r)
        list.push_back({loaded.list[r].engine.get(), loaded.devices[r]});
    return list;
}

}  // namespace

int cmd_serve(int argc, char** argv) {
    ServeOptions options;
    if (!parse_serve_options(argc, argv, options)) return 0;
    const sigset_t set = ending_signals();
    pthread_sigmask(SIG_BLOCK, &set, nullptr);  // inherited by all threads made from here on
    std::signal(SIGPIPE, SIG_IGN);

    Metrics metrics(static_cast<size_t>(options.replicas));
    Replicas replicas(metrics, options.queue);
    Api api(options, replicas, metrics);
    HttpServer server(options.limits, api.callbacks());
    const int port = server.bind(options.host, options.port);
    SignalThread signals(api, replicas, options.drain_seconds);
    server.start();
    std::fprintf(stderr, "quern: listening on %s port %d, loading the model\n", options.host.c_str(), port);

    const LoadOptions load{.model = options.model,
                           .synthetic = options.synthetic,
                           .mix = options.mix,
                           .gpu = options.gpu,
                           .devices = options.devices,
                           .threads = options.threads,
                           .dense = options.dense,
                           .engine = {.context = options.context,
                                      .sequences = options.sequences,
                                      .step_tokens = options.step_tokens,
                                      .kv_type = options.kv_type,
                                      .kv_type_v = options.kv_type_v,
                                      .cache_bytes = options.cache_bytes,
                                      .speculation = options.speculation,
                                      .image_min_tokens = options.vision.min_tokens,
                                      .image_max_tokens = options.vision.max_tokens},
                           .vision = options.vision.on,
                           .vision_format = options.vision.format,
                           .allow_loss = options.allow_loss,
                           .progress = [&](const LoadProgress& p) { api.set_progress(p); }};
    LoadedReplicas loaded = load_replicas(load, options.replicas);
    LoadedModel& first = loaded.list.front();
    Engine& engine = *first.engine;
    if (!options.cache_dir.empty()) restore_states(options.cache_dir, loaded, replicas);
    nlohmann::ordered_json doctor;
    if (options.doctor) doctor = to_json(examine_aloud(load, engine));
    api.set_ready(engine, {first.dense_cost, first.kv_cost}, std::move(doctor));
    signals.serving();
    announce(options, engine, port);
    try {
        replicas.run(engines_of(loaded), [&] { api.set_lost(); });
    } catch (const Error&) {
        server.stop(options.drain_seconds);  // everyone was told; the exit code says the rest
        throw;
    }
    api.set_stopping();
    server.stop(kLastWords);
    return 0;
}

}  // namespace quern
