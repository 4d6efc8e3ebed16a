// Devices of type `emu` for torch's CPU build: memory, streams and events of the stand-in for CUDA
// (tests/sim), which the process shares with what loads libsim.so.
//
// A copy is work of the current stream, and so is filling. Every other operator reads its operands,
// waits, runs on the CPU and writes its result: only the time and the number of waits differ from a
// GPU. So only waits outside operators are counted. Tensors of the CPU beside those of a device are
// refused as by CUDA. Small tensors share blocks of 2 MiB, or with GRADD_SIM_VMM=1 all
// lie in memory of cuMemCreate, which has no handle, as torch's expandable segments. Freed memory
// is given to the next tensor of the stream.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <torch/version.h>

#include <deque>
#include <map>
#include <mutex>

#include "tests/sim/cuda.h"
#include "tests/sim/sim.h"

namespace {

using at::IntArrayRef, at::Scalar, at::ScalarType, at::Tensor;
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
using at::DimnameList; // for macros of torch/autocast_mode.h
#endif
constexpr auto TYPE = c10::DeviceType::PrivateUse1;

void check(int error, const char *what) {
    TORCH_CHECK(!error, "emu: ", what, ": ", cudaGetErrorName((cudaError_t)error));
}

// ---- devices and streams ------------------------------------------------------------------------

c10::DeviceIndex device_count() {
    static const int n = [] {
        int found = 0;
        cudaGetDeviceCount(&found);
        return found;
    }();
    return (c10::DeviceIndex)n;
}

c10::DeviceIndex current_device() {
    int device = 0;
    cudaGetDevice(&device);
    return (c10::DeviceIndex)device;
}

c10::Device device_of(c10::Device asked) {
    return {TYPE, asked.has_index() ? asked.index() : current_device()};
}

std::mutex streams_lock;
std::map<std::pair<int, int64_t>, cudaStream_t> streams; // by device and number; 0 is the default
thread_local std::map<int, int64_t> current_streams;

cudaStream_t stream_of(int device, int64_t number) {
    std::lock_guard<std::mutex> guard(streams_lock);
    cudaStream_t &stream = streams[{device, number}];
    if (!stream) check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
    return stream;
}

int64_t number_of_new_stream(int device) {
    std::lock_guard<std::mutex> guard(streams_lock);
    int64_t number = 1;
    while (streams.count({device, number}))
        number++;
    streams[{device, number}] = nullptr;
    return number;
}

cudaStream_t current_stream() {
    const int device = current_device();
    return stream_of(device, current_streams[device]);
}

void settle() {
    check(cudaStreamSynchronize(current_stream()), "a wait");
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override {
        return TYPE;
    }
    c10::Device exchangeDevice(c10::Device device) const override {
        const c10::Device before = getDevice();
        setDevice(device);
        return before;
    }
    c10::Device getDevice() const override {
        return {TYPE, current_device()};
    }
    void setDevice(c10::Device device) const override {
        if (device.has_index()) check(cudaSetDevice(device.index()), "the device");
    }
    void uncheckedSetDevice(c10::Device device) const noexcept override {
        if (device.has_index()) cudaSetDevice(device.index());
    }
    c10::DeviceIndex deviceCount() const noexcept override {
        return device_count();
    }

    c10::Stream stream(c10::Device device, int64_t number) const {
        return c10::Stream(c10::Stream::UNSAFE, device_of(device), number);
    }
    c10::Stream getStream(c10::Device device) const override {
        return stream(device, current_streams[device_of(device).index()]);
    }
    c10::Stream getDefaultStream(c10::Device device) const override {
        return stream(device, 0);
    }
    c10::Stream getNewStream(c10::Device device, int) const override {
        return stream(device, number_of_new_stream(device_of(device).index()));
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
        return getNewStream(device, 0);
    }
    c10::Stream exchangeStream(c10::Stream next) const override {
        const c10::Stream before = getStream(next.device());
        current_streams[next.device_index()] = next.id();
        return before;
    }
    void *getStreamNativeHandle(const c10::Stream s) const {
        return stream_of(s.device_index(), s.id());
    }
    bool queryStream(const c10::Stream &) const override {
        return !sim_pending();
    }
    void synchronizeStream(const c10::Stream &s) const override {
        check(cudaStreamSynchronize(stream_of(s.device_index(), s.id())), "a wait");
    }
    void synchronizeDevice(c10::DeviceIndex) const override {
        check(cudaDeviceSynchronize(), "a wait");
    }

    void record(void **event, const c10::Stream &s, c10::DeviceIndex,
                c10::EventFlag) const override {
        if (!*event) check(cudaEventCreate((cudaEvent_t *)event), "an event");
        check(cudaEventRecord((cudaEvent_t)*event, stream_of(s.device_index(), s.id())),
              "an event");
    }
    void block(void *event, const c10::Stream &s) const override {
        if (event)
            check(cudaStreamWaitEvent(stream_of(s.device_index(), s.id()), (cudaEvent_t)event, 0),
                  "an event");
    }
    bool queryEvent(void *event) const override {
        if (event) cudaEventSynchronize((cudaEvent_t)event);
        return true;
    }
    void synchronizeEvent(void *event) const override {
        if (event) check(cudaEventSynchronize((cudaEvent_t)event), "an event");
    }
    void destroyEvent(void *event, c10::DeviceIndex) const noexcept override {
        if (event) cudaEventDestroy((cudaEvent_t)event);
    }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- memory -------------------------------------------------------------------------------------

constexpr size_t GRAIN = 512, BLOCK = 2 << 20, REACH = (size_t)1 << 32;

// Memory of one stream.
struct Pool {
    std::multimap<size_t, char *> spare;
    char *next = nullptr; // in the block that is begun, or behind what is mapped
    size_t left = 0;
    char *end = nullptr; // with cuMemCreate: of the addresses that were reserved
};

struct Piece {
    Pool *pool;
    size_t bytes;
};

char *malloc_block(size_t bytes) {
    void *at;
    check(cudaMalloc(&at, bytes), "memory");
    return (char *)at;
}

// More of the pool's range of addresses gets memory.
void map_more(Pool &pool, size_t want) {
    const CUmemAllocationProp prop = {
        1, 1, {1, current_device()},
          nullptr, {}
    };
    const CUmemAccessDesc access = {
        {1, current_device()},
        3
    };
    if (!pool.end) {
        CUdeviceptr at;
        check(cuMemAddressReserve(&at, REACH, 0, 0, 0), "addresses");
        pool.next = (char *)at;
        pool.end = pool.next + REACH;
    }
    while (pool.left < want) {
        CUmemGenericAllocationHandle handle;
        const CUdeviceptr at = (CUdeviceptr)(pool.next + pool.left);
        TORCH_CHECK((char *)at < pool.end, "emu: no addresses left");
        check(cuMemCreate(&handle, BLOCK, &prop, 0), "memory");
        check(cuMemMap(at, BLOCK, 0, handle, 0), "memory");
        check(cuMemSetAccess(at, BLOCK, &access, 1), "memory");
        check(cuMemRelease(handle), "memory");
        pool.left += BLOCK;
    }
}

struct Allocator final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        const size_t want = std::max(GRAIN, (bytes + GRAIN - 1) / GRAIN * GRAIN);
        const cudaStream_t stream = current_stream();
        std::lock_guard<std::mutex> guard(lock());
        Pool &pool = pools()[stream];
        char *at = take(pool, want);
        pieces()[at] = {&pool, want};
        return {at, at, &give_back, c10::Device(TYPE, current_device())};
    }
    c10::DeleterFnPtr raw_deleter() const override {
        return &give_back;
    }
    void copy_data(void *to, const void *from, size_t bytes) const override {
        check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, current_stream()), "a copy");
    }

  private:
    static std::mutex &lock() {
        static std::mutex made;
        return made;
    }
    static std::map<cudaStream_t, Pool> &pools() {
        static auto *made = new std::map<cudaStream_t, Pool>; // tensors may outlive main()
        return *made;
    }
    static std::map<char *, Piece> &pieces() {
        static auto *made = new std::map<char *, Piece>;
        return *made;
    }
    static char *take(Pool &pool, size_t want) {
        static const char *text = getenv("GRADD_SIM_VMM");
        const bool mapped = text && *text;
        const auto found = pool.spare.find(want);
        if (found != pool.spare.end()) {
            char *at = found->second;
            pool.spare.erase(found);
            return at;
        }
        if (!mapped && want > BLOCK / 2) return malloc_block(want);
        if (pool.left < want && mapped) map_more(pool, want);
        if (pool.left < want) {
            pool.next = malloc_block(BLOCK); // it may throw
            pool.left = BLOCK;
        }
        char *at = pool.next;
        pool.next += want;
        pool.left -= want;
        return at;
    }
    static void give_back(void *memory) {
        std::lock_guard<std::mutex> guard(lock());
        const Piece piece = pieces().at((char *)memory);
        piece.pool->spare.emplace(piece.bytes, (char *)memory);
    }
} allocator;

// ---- random numbers: of the CPU, in a state of the device's own
// ----------------------------------

struct Generator final : c10::GeneratorImpl {
    at::Generator cpu = at::make_generator<at::CPUGeneratorImpl>();

    explicit Generator(c10::DeviceIndex index)
        : c10::GeneratorImpl(c10::Device(TYPE, index),
                             c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {
    }
    void set_current_seed(uint64_t seed) override {
        cpu.set_current_seed(seed);
    }
    void set_offset(uint64_t offset) override {
        cpu.set_offset(offset);
    }
    uint64_t get_offset() const override {
        return cpu.get_offset();
    }
    uint64_t current_seed() const override {
        return cpu.current_seed();
    }
    uint64_t seed() override {
        return cpu.seed();
    }
    void set_state(const c10::TensorImpl &state) override {
        cpu.unsafeGetGeneratorImpl()->set_state(state);
    }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
        return cpu.unsafeGetGeneratorImpl()->get_state();
    }
    Generator *clone_impl() const override {
        auto *copy = new Generator(device().index());
        copy->cpu = cpu.clone();
        return copy;
    }
};

const at::Generator &default_generator(int index) {
    static auto *made = [] {
        auto *all = new std::deque<at::Generator>;
        for (int i = 0; i < device_count(); i++)
            all->push_back(at::make_generator<Generator>((c10::DeviceIndex)i));
        return all;
    }();
    return made->at((size_t)(index < 0 ? current_device() : index));
}

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override {
        return true;
    }
    bool isAvailable() const override {
        return device_count() > 0;
    }
    bool hasPrimaryContext(c10::DeviceIndex) const override {
        return true;
    }
    c10::DeviceIndex deviceCount() const override {
        return device_count();
    }
    c10::DeviceIndex getCurrentDevice() const override {
        return current_device();
    }
    void setCurrentDevice(c10::DeviceIndex device) const override {
        check(cudaSetDevice(device), "the device");
    }
    c10::Device getDeviceFromPtr(void *) const override {
        return {TYPE, current_device()};
    }
    at::Allocator *getPinnedMemoryAllocator() const override {
        return at::getCPUAllocator();
    }
    const at::Generator &getDefaultGenerator(c10::DeviceIndex index) const override {
        return default_generator(index);
    }
    at::Generator getNewGenerator(c10::DeviceIndex index) const override {
        return at::make_generator<Generator>(index < 0 ? current_device() : index);
    }
    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t bytes) const override {
        c10::DataPtr memory = allocator.allocate(bytes);
        if (const size_t kept = std::min(bytes, storage.nbytes()))
            allocator.copy_data(memory.get(), storage.data(), kept);
        storage.set_data_ptr(std::move(memory));
        storage.unsafeGetStorageImpl()->set_nbytes(bytes);
    }
} hooks;

const int registered =
    (at::RegisterPrivateUse1HooksInterface(&hooks), c10::SetAllocator(TYPE, &allocator), 0);

// ---- tensors ------------------------------------------------------------------------------------

const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);
using Sizes = c10::SymIntArrayRef;
template <class T> using maybe = std::optional<T>;

at::IntArrayRef plain(Sizes sizes) {
    return C10_AS_INTARRAYREF_SLOW(sizes);
}

Tensor empty(at::IntArrayRef size, maybe<at::ScalarType> type, maybe<at::Layout>,
             maybe<at::Device> device, maybe<bool>, maybe<at::MemoryFormat> format) {
    const c10::DeviceGuard guard(device_of(c10::device_or_default(device)));
    return at::detail::empty_generic(size, &allocator, KEYS, c10::dtype_or_default(type), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, maybe<at::ScalarType> type,
                     maybe<at::Layout>, maybe<at::Device> device, maybe<bool>) {
    const c10::DeviceGuard guard(device_of(c10::device_or_default(device)));
    return at::detail::empty_strided_generic(size, stride, &allocator, KEYS,
                                             c10::dtype_or_default(type));
}

bool is_here(const Tensor &t) {
    return t.device().type() == TYPE;
}

// Bytes from the first element to behind the last.
size_t bytes_of(const Tensor &t) {
    int64_t last = 0;
    for (int64_t i = 0; i < t.dim(); i++)
        last += (t.size(i) - 1) * t.stride(i);
    return t.numel() ? (size_t)(last + 1) * t.itemsize() : 0;
}

void copy_bytes(void *to, const void *from, size_t bytes) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, current_stream()), "a copy");
}

// The same elements in memory of the process; waits.
Tensor on_host(const Tensor &t) {
    const c10::DeviceGuard guard(t.device());
    const Tensor bytes = at::empty({(int64_t)bytes_of(t)}, at::kByte);
    copy_bytes(bytes.data_ptr(), t.data_ptr(), bytes.nbytes());
    settle();
    const Tensor same = at::from_blob(
        bytes.data_ptr(), t.sizes(), t.strides(), [bytes](void *) {},
        at::TensorOptions().dtype(t.dtype()));
    const Tensor turned = t.is_conj() ? same._conj() : same;
    return t.is_neg() ? turned._neg_view() : turned;
}

bool is_lazy(const Tensor &t) {
    return t.is_conj() || t.is_neg();
}

Tensor copy_from(const Tensor &self, const Tensor &to, bool) {
    if (!to.numel()) return to;
    if (!is_here(to)) {
        to.copy_(on_host(self));
        return to;
    }
    const c10::DeviceGuard guard(to.device());
    const bool whole = to.is_contiguous() && !is_lazy(to);
    if (whole && self.scalar_type() == to.scalar_type() && self.sizes() == to.sizes() &&
        self.is_contiguous() && !is_lazy(self) &&
        (!is_here(self) || self.device() == to.device())) {
        copy_bytes(to.data_ptr(), self.data_ptr(), bytes_of(to));
        return to;
    }
    const Tensor made = whole ? at::empty_like(to, to.options().device(at::kCPU)) : on_host(to);
    made.copy_(is_here(self) ? on_host(self) : self);
    copy_bytes(to.data_ptr(), made.data_ptr(), bytes_of(to));
    return to;
}

Tensor copy_from_and_resize(const Tensor &self, const Tensor &to) {
    const_cast<Tensor &>(to).resize_(self.sizes());
    return copy_from(self, to, false);
}

// Without a wait where the elements lie side by side.
Tensor &fill(Tensor &self, const Scalar &value) {
    if (!self.numel()) return self;
    const c10::DeviceGuard guard(self.device());
    const Tensor made = at::empty(self.sizes(), self.options().device(at::kCPU)).fill_(value);
    if (self.is_contiguous() && !is_lazy(self))
        copy_bytes(self.data_ptr(), made.data_ptr(), bytes_of(self));
    else
        copy_from(made, self, false);
    return self;
}

Tensor &zero(Tensor &self) {
    return fill(self, 0);
}

at::Scalar item(const Tensor &t) {
    return on_host(t).item();
}

const Tensor &resize_(const Tensor &self, Sizes wanted, maybe<at::MemoryFormat> format) {
    const at::IntArrayRef size = plain(wanted);
    if (self.sizes() == size && !format) return self;
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
    const size_t need = self.storage_offset() * self.itemsize() + bytes_of(self);
    if (need > self.storage().nbytes()) hooks.resizePrivateUse1Bytes(self.storage(), need);
    return self;
}

Tensor &set_place(Tensor &self, c10::Storage storage, c10::SymInt offset, Sizes size,
                  Sizes stride) {
    auto *t = self.unsafeGetTensorImpl();
    t->set_storage_keep_dtype(storage);
    t->set_storage_offset(offset.guard_int(__FILE__, __LINE__));
    if (stride.size() == size.size())
        t->set_sizes_and_strides(plain(size), plain(stride));
    else
        t->set_sizes_contiguous(plain(size));
    return self;
}

Tensor &set_storage(Tensor &self, c10::Storage storage) {
    const int64_t n = (int64_t)(storage.nbytes() / self.itemsize());
    return set_place(self, storage, 0, c10::SymInt(n), {});
}

Tensor &set_tensor(Tensor &self, const Tensor &source) {
    return set_place(self, source.storage(), source.storage_offset(), source.sym_sizes(),
                     source.sym_strides());
}

Tensor &set_nothing(Tensor &self) {
    return set_tensor(self, at::empty({0}, self.options()));
}

Tensor as_strided(const Tensor &self, Sizes size, Sizes stride, maybe<c10::SymInt> offset) {
    return at::native::as_strided_tensorimpl(
        self, plain(size), plain(stride),
        offset ? maybe<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt);
}

Tensor view(const Tensor &self, Sizes size) {
    return at::native::view(self, plain(size));
}

Tensor reshape_alias(const Tensor &self, Sizes size, Sizes stride) {
    return at::native::_reshape_alias(self, plain(size), plain(stride));
}

void record_stream(Tensor &, c10::Stream) {
}

// ---- convolutions: torch gives those of a new device to these two -------------------------------

using Mask = std::array<bool, 3>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

Tensor convolution(const Tensor &x, const Tensor &weight, const maybe<Tensor> &bias, Sizes stride,
                   Sizes padding, Sizes dilation, bool transposed, Sizes output_padding,
                   c10::SymInt groups) {
    maybe<Tensor> b;
    if (bias && bias->defined()) b = on_host(*bias);
    return at::convolution_symint(on_host(x), on_host(weight), b, stride, padding, dilation,
                                  transposed, output_padding, groups)
        .contiguous() // which torch expects of these
        .to(x.device());
}

Three convolution_backward(const Tensor &grad, const Tensor &x, const Tensor &weight, Sizes stride,
                           Sizes padding, Sizes dilation, bool transposed, Sizes output_padding,
                           c10::SymInt groups, Mask wanted) {
    const c10::SymInt channels = grad.sym_size(1);
    auto [a, b, c] = at::convolution_backward_symint(on_host(grad), on_host(x), on_host(weight),
                                                     Sizes(channels), stride, padding, dilation,
                                                     transposed, output_padding, groups, wanted);
    const auto here = [&](const Tensor &t) { return t.defined() ? t.to(x.device()) : t; };
    return {here(a), here(b), here(c)};
}

// Waits are an operator's own.
struct Uncounted {
    Uncounted() {
        sim_count(false);
    }
    ~Uncounted() {
        sim_count(true);
    }
};

// In its life the CPU draws its random numbers from a device's state.
struct Drawing {
    at::Generator here = at::detail::getDefaultCPUGenerator(), there;
    c10::intrusive_ptr<c10::TensorImpl> before = here.unsafeGetGeneratorImpl()->get_state();

    explicit Drawing(int device) : there(default_generator(device)) {
        here.unsafeGetGeneratorImpl()->set_state(*there.unsafeGetGeneratorImpl()->get_state());
    }
    ~Drawing() {
        there.unsafeGetGeneratorImpl()->set_state(*here.unsafeGetGeneratorImpl()->get_state());
        here.unsafeGetGeneratorImpl()->set_state(*before);
    }
};

// Operators that take tensors of the CPU beside those of a device: indices, and lengths.
bool mixes_devices(const std::string &name) {
    for (const char *part : {"index", "_pack_padded_sequence", "tensor_split", "ctc_loss"})
        if (name.find(part) != std::string::npos) return true;
    return false;
}

// Refuses what CUDA refuses: a tensor of the CPU that is no scalar.
void check_devices(const c10::OperatorHandle &op, c10::ArrayRef<c10::IValue> arguments) {
    bool here = false, there = false;
    const auto look = [&](const Tensor &t) {
        if (!t.defined()) return;
        here = here || is_here(t);
        there = there || (t.is_cpu() && t.dim());
    };
    for (const c10::IValue &value : arguments) {
        if (value.isTensor()) look(value.toTensor());
        if (value.isTensorList())
            for (const Tensor &t : value.toTensorVector())
                look(t);
    }
    const std::string &name = op.schema().name();
    TORCH_CHECK(!(here && there) || mixes_devices(name), name,
                ": expected all tensors to be on the same device, found emu and cpu");
}

// Running statistics, which native_batch_norm() changes without saying so.
struct Statistics {
    std::vector<std::pair<Tensor, Tensor>> pairs; // of the device, and on the host

    Statistics(const c10::OperatorHandle &op, torch::jit::Stack *stack, size_t first) {
        if (op.schema().name() != "aten::native_batch_norm") return;
        for (const size_t i : {first + 3, first + 4}) {
            c10::IValue &value = (*stack)[i];
            if (!value.isTensor() || !value.toTensor().defined()) continue;
            pairs.emplace_back(value.toTensor(), on_host(value.toTensor()).clone());
            value = pairs.back().second;
        }
    }
    void put_back() const {
        for (const auto &[there, here] : pairs)
            there.copy_(here);
    }
};

// An operator on the CPU. A generator of the device is the one within it.
void run_on_cpu(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
    const size_t first = stack->size() - op.schema().arguments().size();
    int device = current_device();
    check_devices(op, c10::ArrayRef<c10::IValue>(*stack).slice(first));
    for (size_t i = first; i < stack->size(); i++) {
        c10::IValue &value = (*stack)[i];
        if (value.isTensor() && value.toTensor().defined() && is_here(value.toTensor()))
            device = value.toTensor().device().index();
        if (value.isGenerator() && value.toGenerator().device().type() == TYPE)
            value = value.toGenerator().get<Generator>()->cpu;
    }
    const Uncounted uncounted;
    std::optional<Drawing> drawing;
    if (op.hasTag(at::Tag::nondeterministic_seeded)) drawing.emplace(device);
    const Statistics statistics(op, stack, first);
    at::native::cpu_fallback(op, stack);
    statistics.put_back();
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("resize_", resize_);
    m.impl("set_", set_nothing);
    m.impl("set_.source_Tensor", set_tensor);
    m.impl("set_.source_Storage", set_storage);
    m.impl("set_.source_Storage_storage_offset", set_place);
    m.impl("as_strided", as_strided);
    m.impl("view", view);
    m.impl("_reshape_alias", reshape_alias);
    m.impl("unfold", at::native::unfold);
    m.impl("view_as_real", at::native::view_as_real);
    m.impl("view_as_complex", at::native::view_as_complex);
    m.impl("record_stream", record_stream);
    m.impl("convolution_overrideable", convolution);
    m.impl("convolution_backward_overrideable", convolution_backward);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("_local_scalar_dense", item);
    m.impl("fill_.Scalar", fill);
    m.impl("zero_", zero);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

// Copies look at these themselves: what torch does for them would copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
    m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
    m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

// ---- autocast: as on CUDA -----------------------------------------------------------------------

Tensor refused(const Tensor &, const Tensor &, const maybe<Tensor> &, int64_t) {
    TORCH_CHECK(false, "emu: binary_cross_entropy is unsafe to autocast");
}

#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL_PRECISION(...)  KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FULL_RESULT(...)     KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...)          KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
    m.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
    AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
    AT_FORALL_FP32(FULL_PRECISION)
    AT_FORALL_FP32_SET_OPT_DTYPE(FULL_RESULT)
    AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
    AT_FORALL_PROMOTE(WIDEST)
    m.impl("binary_cross_entropy", refused);
}

// ---- for Python ---------------------------------------------------------------------------------

extern "C" void Py_IncRef(void *);
extern "C" void Py_DecRef(void *);
extern "C" int PyGILState_Ensure(void);
extern "C" void PyGILState_Release(int);

// A tensor of memory at an address of the device. Its storage keeps `owner`, the id of an object of
// Python.
Tensor from_address(int64_t at, int64_t owner, at::IntArrayRef size, at::ScalarType dtype,
                    int64_t device) {
    void *object = (void *)owner;
    const c10::Device place(TYPE, (c10::DeviceIndex)device);
    Py_IncRef(object);
    const auto drop = [object](void *) {
        const int state = PyGILState_Ensure();
        Py_DecRef(object);
        PyGILState_Release(state);
    };
    return at::for_blob((void *)at, size)
        .deleter(drop)
        .options(at::TensorOptions().dtype(dtype).device(place))
        .target_device(place)
        .make_tensor();
}

void seed(int64_t number, int64_t device) {
    default_generator((int)device).unsafeGetGeneratorImpl()->set_current_seed((uint64_t)number);
}

Tensor random_state(int64_t device) {
    return Tensor(default_generator((int)device).unsafeGetGeneratorImpl()->get_state());
}

void set_random_state(const Tensor &state, int64_t device) {
    default_generator((int)device)
        .unsafeGetGeneratorImpl()
        ->set_state(*state.unsafeGetTensorImpl());
}

int64_t count() {
    return device_count();
}

int64_t stream_address() {
    return (int64_t)current_stream();
}

TORCH_LIBRARY(emu, m) {
    m.def("from_address(int at, int owner, int[] size, ScalarType dtype, int device) -> Tensor",
          from_address);
    m.def("stream_address() -> int", stream_address);
    m.def("device_count() -> int", count);
    m.def("seed(int number, int device) -> ()", seed);
    m.def("random_state(int device) -> Tensor", random_state);
    m.def("set_random_state(Tensor state, int device) -> ()", set_random_state);
}

} // namespace
