/* gradd_train.hpp, as a program of a device uses it: the model is the first argument, a training
 * model loss = mean((x w - y)^2) of x [n, 2] and w [2, 1]. Prints the line that it has learnt, its
 * bits, and the texts of two failures; the programs for other languages (tests/python/ondevice)
 * print the same. The second argument, if there is one, is a file for the state, of which it prints
 * step and position when it has opened it again.
 */
#include <cmath>
#include <cstdio>
#include <cstring>
#include <utility>

#include "train/gradd_train.hpp"

static gradd::Session open(const gradd::State &state, const char *path) {
    gradd_train_options_t options{};
    options.training.path = path;
    options.optimizer = gradd_train_sgd();
    options.threads = 1;
    return gradd::Session(state, options);
}

static unsigned bits(float value) {
    std::uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    return word;
}

static int train(const char *path, const char *file) {
    const float x[] = {1, 0, 0, 1, 1, 1, 2, 1}, y[] = {3, -1, 2, 5}, zeros[] = {0, 0};
    gradd::State state;
    state.add("w", gradd::tensor(zeros, {2, 1}));
    state.set("epoch", std::int64_t{3});
    state.set("name", std::string("line"));
    if (file) state.keep(file);
    gradd::Session session = open(state, path);
    session.set_learning_rate(0.25f);
    float loss = 0;
    for (int i = 0; i < 200; i++) {
        session.lazy_reset_grad();
        const auto outputs = session.step({gradd::tensor(x, {4, 2}), gradd::tensor(y, {4, 1})});
        loss = *gradd::elements<float>(outputs[0]);
        session.optimizer_step();
    }
    state.set_position(200);
    if (file) state.commit();
    const std::vector<float> w = session.parameters();
    std::printf("%.3f %.3f %.3f\n", loss, w[0], w[1]);
    std::printf("bits %08x %08x %08x\n", bits(loss), bits(w[0]), bits(w[1]));
    std::printf("%s %lld %s\n", session.input_names()[1].c_str(),
                static_cast<long long>(state.property("epoch").integer),
                state.property("name").text);
    try {
        session.step({gradd::tensor(x, {4, 2})});
    } catch (const gradd::Error &error) {
        std::printf("%s: %s\n", gradd_status_name(error.status), error.what());
    }
    gradd::Session moved = std::move(session);
    return moved.freeze("v*");
}

static void print_kept(const char *file) {
    const gradd_train_progress_t kept = gradd::State::open(file).progress();
    std::printf("%lld %lld\n", static_cast<long long>(kept.step),
                static_cast<long long>(kept.position));
}

static int run(const char *path, const char *file) {
    try {
        return train(path, file);
    } catch (const gradd::Error &error) {
        std::printf("%s: %s\n", gradd_status_name(error.status), error.what());
        return error.status == GRADD_E_TENSOR ? 0 : 1;
    }
}

int main(int n, char **paths) {
    const char *file = n > 2 ? paths[2] : nullptr;
    const int status = run(n > 1 ? paths[1] : "", file);
    if (file) print_kept(file);
    return status;
}
