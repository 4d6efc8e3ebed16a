/* gradd_train.hpp - gradd_train.h for C++17: objects that close themselves, and exceptions.
 *
 *     gradd::State state = gradd::State::load("checkpoint");
 *     gradd::Session session(state, {.training = {.path = "training_model.onnx"}, ...});   // C++20
 *     auto outputs = session.step({gradd::tensor(x, {n, 784}), gradd::tensor(labels, {n})});
 *     float loss = *gradd::elements<float>(outputs[0]);
 *
 * What fails throws gradd::Error. Objects can be moved, not copied. A state outlives its session.
 * Everything else is as in gradd_train.h, whose functions take what handle() gives.
 */
#ifndef GRADD_TRAIN_HPP
#define GRADD_TRAIN_HPP

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "train/gradd_train.h"

namespace gradd {

class Error : public std::runtime_error {
  public:
    explicit Error(gradd_status_t status)
        : std::runtime_error(gradd_error_message()), status(status) {
    }
    const gradd_status_t status;
};

inline void check(gradd_status_t status) {
    if (status != GRADD_OK) throw Error(status);
}

template <typename T> constexpr gradd_dtype_t dtype_of() {
    if constexpr (std::is_same_v<T, float>)
        return GRADD_DT_F32;
    else if constexpr (std::is_same_v<T, double>)
        return GRADD_DT_F64;
    else if constexpr (std::is_same_v<T, std::int64_t>)
        return GRADD_DT_I64;
    else if constexpr (std::is_same_v<T, std::int32_t>)
        return GRADD_DT_I32;
    else if constexpr (std::is_same_v<T, std::uint8_t>)
        return GRADD_DT_U8;
    else if constexpr (std::is_same_v<T, std::int8_t>)
        return GRADD_DT_I8;
    else {
        static_assert(std::is_same_v<T, bool>, "not an element type of gradd");
        return GRADD_DT_BOOL;
    }
}

/* The caller's elements as a tensor of these sizes. Throws std::length_error for too many. */
template <typename T>
gradd_train_tensor_t tensor(const T *data, std::initializer_list<std::int64_t> dims) {
    gradd_train_tensor_t made{};
    if (dims.size() > GRADD_MAX_RANK) throw std::length_error("a tensor of too many dimensions");
    made.type.dtype = dtype_of<T>();
    for (const std::int64_t dim : dims)
        made.type.dims[made.type.rank++] = dim;
    made.data = data;
    return made;
}

/* Elements of a tensor that a session gave. Throws std::invalid_argument for another type. */
template <typename T> const T *elements(const gradd_train_tensor_t &from) {
    if (from.type.dtype != dtype_of<T>()) throw std::invalid_argument("another element type");
    return static_cast<const T *>(from.data);
}

class State {
  public:
    State() {
        gradd_train_state_t *state;
        check(gradd_train_state_create(&state));
        own_.reset(state);
    }
    static State load(const std::string &path) {
        gradd_train_state_t *state;
        check(gradd_train_state_load(path.c_str(), &state));
        return State(state);
    }
    static State load(const void *bytes, std::size_t n) {
        gradd_train_state_t *state;
        check(gradd_train_state_load_bytes(bytes, n, &state));
        return State(state);
    }
    /* The state in a file, which is made of the checkpoint if it is not there. */
    static State open(const std::string &path, const gradd_train_lasting_t &options = {}) {
        gradd_train_state_t *state;
        check(gradd_train_open_state(path.c_str(), &options, &state));
        return State(state);
    }
    void keep(const std::string &path, const gradd_train_lasting_t &options = {}) {
        check(gradd_train_keep_state(handle(), path.c_str(), &options));
    }
    void commit() {
        check(gradd_train_commit(handle()));
    }
    gradd_train_progress_t progress() const {
        return gradd_train_state_progress(handle());
    }
    void set_position(std::int64_t position) {
        gradd_train_state_set_position(handle(), position);
    }
    void save(const std::string &path, bool with_optimizer = false) const {
        check(gradd_train_state_save(handle(), path.c_str(), with_optimizer));
    }
    void add(const std::string &name, const gradd_train_tensor_t &values, bool trainable = true) {
        check(gradd_train_state_add(handle(), name.c_str(), &values.type, values.data, trainable));
    }
    int size() const {
        return gradd_train_state_count(handle());
    }
    gradd_train_parameter_t operator[](int i) const {
        return gradd_train_state_parameter(handle(), i);
    }
    /* Throws std::out_of_range. */
    gradd_train_parameter_t operator[](const std::string &name) const {
        return (*this)[at(name)];
    }
    void write(const std::string &name, const gradd_train_tensor_t &values) {
        check(gradd_train_state_write(handle(), at(name), &values.type, values.data));
    }
    void set(const std::string &name, std::int64_t value) {
        set({name.c_str(), GRADD_TRAIN_INT, value, 0, nullptr});
    }
    void set(const std::string &name, float value) {
        set({name.c_str(), GRADD_TRAIN_FLOAT, 0, value, nullptr});
    }
    void set(const std::string &name, const std::string &value) {
        set({name.c_str(), GRADD_TRAIN_TEXT, 0, 0, value.c_str()});
    }
    /* Throws std::out_of_range. */
    gradd_train_property_t property(const std::string &name) const {
        const int i = gradd_train_state_find_property(handle(), name.c_str());
        if (i < 0) throw std::out_of_range("there is no property '" + name + "'");
        return gradd_train_state_property(handle(), i);
    }
    gradd_train_state_t *handle() const {
        return own_.get();
    }

  private:
    explicit State(gradd_train_state_t *state) : own_(state) {
    }
    int at(const std::string &name) const {
        const int i = gradd_train_state_find(handle(), name.c_str());
        if (i < 0) throw std::out_of_range("there is no parameter '" + name + "'");
        return i;
    }
    void set(const gradd_train_property_t &p) {
        check(gradd_train_state_set_property(handle(), &p));
    }
    struct Destroy {
        void operator()(gradd_train_state_t *state) const {
            gradd_train_state_destroy(state);
        }
    };
    std::unique_ptr<gradd_train_state_t, Destroy> own_;
};

class Session {
  public:
    using Inputs = std::vector<gradd_train_tensor_t>;
    /* Their memory is the session's, until its next step. */
    using Outputs = std::vector<gradd_train_tensor_t>;

    Session(const State &state, const gradd_train_options_t &options) {
        gradd_train_session_t *session;
        check(gradd_train_open(state.handle(), &options, &session));
        own_.reset(session);
    }
    Outputs step(const Inputs &inputs, const volatile int *cancel = nullptr) {
        Outputs outputs(count(GRADD_TRAIN_TRAINING));
        check(
            gradd_train_step(handle(), inputs.data(), int(inputs.size()), outputs.data(), cancel));
        return outputs;
    }
    Outputs eval(const Inputs &inputs, const volatile int *cancel = nullptr) {
        Outputs outputs(count(GRADD_TRAIN_EVAL));
        check(gradd_train_eval_step(handle(), inputs.data(), int(inputs.size()), outputs.data(),
                                    cancel));
        return outputs;
    }
    void lazy_reset_grad() {
        gradd_train_lazy_reset_grad(handle());
    }
    /* The norm of all gradients before clipping, 0 if they are not clipped. */
    double optimizer_step() {
        double norm;
        check(gradd_train_optimizer_step(handle(), &norm));
        return norm;
    }
    float learning_rate() const {
        return gradd_train_learning_rate(handle());
    }
    void set_learning_rate(float rate) {
        check(gradd_train_set_learning_rate(handle(), rate));
    }
    void set_linear_schedule(std::int64_t warmup, std::int64_t total, float initial) {
        check(gradd_train_set_linear_schedule(handle(), warmup, total, initial));
    }
    void schedule_step() {
        check(gradd_train_schedule_step(handle()));
    }
    void set_seed(std::uint64_t seed) {
        gradd_train_set_seed(handle(), seed);
    }
    int freeze(const std::string &pattern) {
        int changed;
        check(gradd_train_freeze(handle(), pattern.c_str(), &changed));
        return changed;
    }
    int thaw(const std::string &pattern) {
        int changed;
        check(gradd_train_thaw(handle(), pattern.c_str(), &changed));
        return changed;
    }
    std::vector<float> parameters(bool trainable_only = false) const {
        std::int64_t n;
        check(gradd_train_contiguous_count(handle(), trainable_only, &n));
        std::vector<float> values(static_cast<std::size_t>(n));
        check(gradd_train_copy_out(handle(), trainable_only, values.data(), n));
        return values;
    }
    void set_parameters(const std::vector<float> &values, bool trainable_only = false) {
        check(gradd_train_copy_in(handle(), trainable_only, values.data(),
                                  std::int64_t(values.size())));
    }
    std::vector<std::string> input_names(gradd_train_phase_t phase = GRADD_TRAIN_TRAINING) const {
        std::vector<std::string> names;
        for (int i = 0; i < gradd_train_input_count(handle(), phase); i++)
            names.emplace_back(gradd_train_input_name(handle(), phase, i));
        return names;
    }
    std::vector<std::string> output_names(gradd_train_phase_t phase = GRADD_TRAIN_TRAINING) const {
        std::vector<std::string> names;
        for (int i = 0; i < gradd_train_output_count(handle(), phase); i++)
            names.emplace_back(gradd_train_output_name(handle(), phase, i));
        return names;
    }
    void export_model(const std::string &path, const std::vector<std::string> &outputs) const {
        std::vector<const char *> names;
        for (const std::string &name : outputs)
            names.push_back(name.c_str());
        check(gradd_train_export(handle(), path.c_str(), names.data(), int(names.size())));
    }
    gradd_train_memory_t memory() const {
        return gradd_train_memory(handle());
    }
    gradd_train_session_t *handle() const {
        return own_.get();
    }

  private:
    std::size_t count(gradd_train_phase_t phase) const {
        return std::size_t(gradd_train_output_count(handle(), phase));
    }
    struct Close {
        void operator()(gradd_train_session_t *session) const {
            gradd_train_close(session);
        }
    };
    std::unique_ptr<gradd_train_session_t, Close> own_;
};

} // namespace gradd
#endif
