/* The extension module `atoll._kernels`: kernels on the buffers of numpy arrays.
 *
 * Each function checks its arguments, releases the GIL and calls a kernel. Wrong types, lengths,
 * alignments or overlaps raise ValueError before anything is read. What depends on the values (NaN,
 * bytes that are not allowed) is answered with False; the callers turn it into their errors.
 * collectives/native.py says what each function takes.
 */
#include "buffers.h"
#include "kernels.h"

#include <string.h>

/* ---------------------------------------------------------------- which kernels */

enum { LEVELS_MAX = 3 };

/* Those that this processor can run, the fastest last; and the ones in use. Read and written with
 * the GIL. */
static const kernels *levels[LEVELS_MAX];
static int levels_count;
static const kernels *active;

#if defined(HAVE_X86_LEVELS)
/* Vectors of 512 bits make most kernels faster, up to twice, but not those that spread nibbles over
 * bytes, nor the outer steps (docs/log.md). */
static const kernels *fastest_with_avx512(void)
{
    static kernels found;
    found = kernels_avx512;
    memcpy(found.rules, kernels_avx2.rules, sizeof found.rules);
    for (int i = 0; i < CODECS; i++)
        if (strncmp(found.codecs[i].name, "int4", 4) == 0 ||
            strncmp(found.codecs[i].name, "fp4", 3) == 0 ||
            strncmp(found.codecs[i].name, "dynamic", 7) == 0) {
            found.codecs[i].decode = kernels_avx2.codecs[i].decode;
            found.codecs[i].decode_add = kernels_avx2.codecs[i].decode_add;
        }
    return &found;
}
#endif

static void find_levels(void)
{
    dynamic_start();
    levels_count = 0;
    levels[levels_count++] = &kernels_base;
#if defined(HAVE_X86_LEVELS)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) {
        levels[levels_count++] = &kernels_avx2;
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
            levels[levels_count++] = fastest_with_avx512();
    }
#endif
    active = levels[levels_count - 1];
}

static PyObject *py_levels(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    PyObject *names = PyTuple_New(levels_count);
    for (int i = 0; names != NULL && i < levels_count; i++) {
        PyObject *name = PyUnicode_FromString(levels[i]->level);
        if (name == NULL)
            Py_CLEAR(names);
        else
            PyTuple_SetItem(names, i, name);
    }
    return names;
}

static PyObject *py_level(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyUnicode_FromString(active->level);
}

static int is_text(PyObject *object, const char *text)
{
    return PyUnicode_Check(object) && PyUnicode_CompareWithASCIIString(object, text) == 0;
}

static PyObject *py_use(PyObject *module, PyObject *name)
{
    (void)module;
    for (int i = 0; i < levels_count; i++)
        if (is_text(name, levels[i]->level)) {
            active = levels[i];
            Py_RETURN_NONE;
        }
    PyErr_Format(PyExc_ValueError, "this processor has no kernels %R", name);
    return NULL;
}

/* ---------------------------------------------------------------- arguments */

static int has_arguments(Py_ssize_t given, Py_ssize_t wanted)
{
    if (given == wanted)
        return 1;
    PyErr_Format(PyExc_TypeError, "%zd arguments, not %zd", wanted, given);
    return 0;
}

static int to_size(PyObject *object, size_t *size)
{
    Py_ssize_t given = PyLong_AsSsize_t(object);
    if (given == -1 && PyErr_Occurred())
        return 0;
    if (given < 0) {
        PyErr_SetString(PyExc_ValueError, "a count cannot be negative");
        return 0;
    }
    *size = (size_t)given;
    return 1;
}

static int to_double(PyObject *object, double *number)
{
    *number = PyFloat_AsDouble(object);
    return !(*number == -1.0 && PyErr_Occurred());
}

/* 1, or 0 where the number does not fit into 64 bits, or -1 with TypeError. */
static int to_key(PyObject *object, uint64_t *key)
{
    unsigned long long given = PyLong_AsUnsignedLongLong(object);
    *key = given;
    if (given != (unsigned long long)-1 || !PyErr_Occurred())
        return 1;
    if (!PyErr_ExceptionMatches(PyExc_OverflowError))
        return -1;
    PyErr_Clear();
    return 0;
}

static const codec_kernels *to_codec(PyObject *name)
{
    for (int i = 0; i < CODECS; i++)
        if (is_text(name, active->codecs[i].name))
            return &active->codecs[i];
    PyErr_Format(PyExc_ValueError, "there are no kernels for codec %R", name);
    return NULL;
}

/* 0 with ValueError unless the buffer has the bytes that `count` elements take. */
static int has_encoded(const buffers *all, int index, const codec_kernels *codec, size_t count)
{
    if (count > (size_t)PY_SSIZE_T_MAX / sizeof(double)) { /* what follows cannot overflow */
        PyErr_SetString(PyExc_ValueError, "so many elements cannot be");
        return 0;
    }
    return buffer_has(all, index, codec->encoded_bytes(count), "the encoded data");
}

static PyObject *finish(buffers *all, PyObject *answer)
{
    give_back_buffers(all);
    return Py_XNewRef(answer);
}

/* ---------------------------------------------------------------- codecs */

static PyObject *py_encode(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    (void)module;
    buffers all = {.taken = 0};
    const codec_kernels *codec;
    const float *values;
    uint8_t *out;
    uint64_t key;
    int done;
    if (!has_arguments(count, 4) || (codec = to_codec(given[0])) == NULL ||
        (done = to_key(given[2], &key)) < 0 ||
        (values = take_buffer(&all, given[1], "values", "f", READ)) == NULL ||
        (out = take_buffer(&all, given[3], "out", "B", WRITE)) == NULL ||
        !has_encoded(&all, 1, codec, buffer_count(&all, 0)) || !buffers_are_apart(&all, 0))
        return finish(&all, NULL);
    size_t elements = buffer_count(&all, 0);
    Py_BEGIN_ALLOW_THREADS
    done = done && codec->encode(values, elements, key, out);
    Py_END_ALLOW_THREADS
    return finish(&all, done ? Py_True : Py_False);
}

static PyObject *py_check(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    (void)module;
    buffers all = {.taken = 0};
    const codec_kernels *codec;
    const uint8_t *data;
    size_t elements;
    int done = 0;
    if (!has_arguments(count, 3) || (codec = to_codec(given[0])) == NULL ||
        (data = take_buffer(&all, given[1], "data", "B", READ)) == NULL ||
        !to_size(given[2], &elements) || !has_encoded(&all, 0, codec, elements))
        return finish(&all, NULL);
    Py_BEGIN_ALLOW_THREADS
    done = codec->check(data, elements);
    Py_END_ALLOW_THREADS
    return finish(&all, done ? Py_True : Py_False);
}

static PyObject *py_decode(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    (void)module;
    buffers all = {.taken = 0};
    const codec_kernels *codec;
    const uint8_t *data;
    float *out;
    int done = 0;
    if (!has_arguments(count, 3) || (codec = to_codec(given[0])) == NULL ||
        (data = take_buffer(&all, given[1], "data", "B", READ)) == NULL ||
        (out = take_buffer(&all, given[2], "out", "f", WRITE)) == NULL ||
        !has_encoded(&all, 0, codec, buffer_count(&all, 1)) || !buffers_are_apart(&all, 0))
        return finish(&all, NULL);
    size_t elements = buffer_count(&all, 1);
    Py_BEGIN_ALLOW_THREADS
    done = codec->check(data, elements);
    if (done)
        codec->decode(data, elements, 0, elements, out);
    Py_END_ALLOW_THREADS
    return finish(&all, done ? Py_True : Py_False);
}

/* Row by row, and without giving the GIL away: a piece takes less time than that. */
static PyObject *py_decode_columns(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    (void)module;
    buffers all = {.taken = 0};
    const codec_kernels *codec;
    float *out;
    size_t total, lo;
    PyObject *parts = NULL;
    if (!has_arguments(count, 5) || (codec = to_codec(given[0])) == NULL ||
        !to_size(given[2], &total) || !to_size(given[3], &lo) ||
        (out = take_buffer(&all, given[4], "out", "f", WRITE)) == NULL ||
        (parts = PySequence_Tuple(given[1])) == NULL)
        return finish(&all, NULL);
    size_t rows = (size_t)PyTuple_Size(parts);
    size_t width = rows ? buffer_count(&all, 0) / rows : 0;
    int fits = buffer_has(&all, 0, width * rows, "out");
    if (fits && (lo % PIECE != 0 || lo > total || width > total - lo ||
                 (width % PIECE != 0 && width != total - lo))) {
        PyErr_SetString(PyExc_ValueError, "these columns are no whole pieces");
        fits = 0;
    }
    for (size_t row = 0; fits && row < rows; row++) {
        PyObject *part = PyTuple_GetItem(parts, (Py_ssize_t)row);
        const uint8_t *data = take_buffer(&all, part, "a part", "B", READ);
        fits = data != NULL && has_encoded(&all, 1, codec, total) && buffers_are_apart(&all, 0);
        if (fits) {
            codec->decode(data, total, lo, width, out + width * row);
            give_back_buffer(&all);
        }
    }
    Py_DECREF(parts);
    return finish(&all, fits ? Py_None : NULL);
}

static PyObject *py_decode_add(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    (void)module;
    buffers all = {.taken = 0};
    const codec_kernels *codec;
    const uint8_t *data;
    float *into;
    double factor;
    int done = 0;
    if (!has_arguments(count, 4) || (codec = to_codec(given[0])) == NULL ||
        (data = take_buffer(&all, given[1], "data", "B", READ)) == NULL ||
        !to_double(given[2], &factor) ||
        (into = take_buffer(&all, given[3], "into", "f", WRITE)) == NULL ||
        !has_encoded(&all, 0, codec, buffer_count(&all, 1)) || !buffers_are_apart(&all, 0))
        return finish(&all, NULL);
    size_t elements = buffer_count(&all, 1);
    Py_BEGIN_ALLOW_THREADS
    done = codec->check(data, elements);
    if (done)
        codec->decode_add(data, elements, (float)factor, into);
    Py_END_ALLOW_THREADS
    return finish(&all, done ? Py_True : Py_False);
}

static PyObject *py_weigh(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    (void)module;
    buffers all = {.taken = 0};
    const kernels *set = active;
    const uint8_t *data;
    float *into;
    double factor;
    int done = 0, first;
    if (!has_arguments(count, 4) || (first = PyObject_IsTrue(given[3])) < 0 ||
        (data = take_buffer(&all, given[0], "data", "B", READ)) == NULL ||
        !to_double(given[1], &factor) ||
        (into = take_buffer(&all, given[2], "into", "f", WRITE)) == NULL ||
        !buffer_has(&all, 0, sizeof(float) * buffer_count(&all, 1), "data") ||
        !buffers_are_apart(&all, 0))
        return finish(&all, NULL);
    size_t elements = buffer_count(&all, 1);
    Py_BEGIN_ALLOW_THREADS
    done = set->weigh(data, elements, (float)factor, into, first);
    Py_END_ALLOW_THREADS
    return finish(&all, done ? Py_True : Py_False);
}

/* ---------------------------------------------------------------- the outer step */

static PyObject *py_outer_step(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    (void)module;
    enum { THETA, MOMENTUM, DELTA, OUT_THETA, OUT_MOMENTUM, ARRAYS };
    static const char *const names[] = {"theta", "momentum", "delta", "out_theta", "out_momentum"};
    static const int places[] = {1, 2, 3, 6, 7};
    buffers all = {.taken = 0};
    const rule_kernels *rule = NULL;
    void *at[ARRAYS];
    double lr, mu;
    if (!has_arguments(count, 8) || !to_double(given[4], &lr) || !to_double(given[5], &mu))
        return NULL;
    for (int i = 0; i < RULES; i++)
        if (is_text(given[0], active->rules[i].name))
            rule = &active->rules[i];
    if (rule == NULL)
        return PyErr_Format(PyExc_ValueError, "there is no outer step %R", given[0]);
    for (int i = 0; i < ARRAYS; i++) {
        char first[2] = {i ? buffer_format(&all, THETA) : '\0', '\0'};
        at[i] = take_buffer(&all, given[places[i]], names[i], i ? first : "fd", i >= OUT_THETA);
        if (at[i] == NULL || !buffer_has(&all, i, buffer_count(&all, THETA), names[i]))
            return finish(&all, NULL);
    }
    if (!buffers_are_apart(&all, OUT_THETA - THETA))
        return finish(&all, NULL);
    size_t elements = buffer_count(&all, THETA);
    int narrow = buffer_format(&all, THETA) == 'f';
    Py_BEGIN_ALLOW_THREADS
    if (narrow)
        rule->float32(at[THETA], at[MOMENTUM], at[DELTA], elements, (float)lr, (float)mu,
                      at[OUT_THETA], at[OUT_MOMENTUM]);
    else
        rule->float64(at[THETA], at[MOMENTUM], at[DELTA], elements, lr, mu, at[OUT_THETA],
                      at[OUT_MOMENTUM]);
    Py_END_ALLOW_THREADS
    return finish(&all, Py_None);
}

/* ---------------------------------------------------------------- robust rules */

/* A number of rows, or -1 with ValueError. */
static Py_ssize_t to_rows(PyObject *object)
{
    Py_ssize_t rows = PyLong_AsSsize_t(object);
    if (rows == -1 && PyErr_Occurred())
        return -1;
    if (rows >= 1 && rows <= ROWS_MAX)
        return rows;
    PyErr_Format(PyExc_ValueError, "%zd rows; 1 to %d are possible", rows, ROWS_MAX);
    return -1;
}

static PyObject *py_mix(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    (void)module;
    buffers all = {.taken = 0};
    const kernels *set = active;
    const float *rows, *coefficients;
    float *out;
    Py_ssize_t n;
    if (!has_arguments(count, 4) || (n = to_rows(given[1])) < 0 ||
        (rows = take_buffer(&all, given[0], "rows", "f", READ)) == NULL ||
        (coefficients = take_buffer(&all, given[2], "coefficients", "f", READ)) == NULL ||
        (out = take_buffer(&all, given[3], "out", "f", WRITE)) == NULL)
        return finish(&all, NULL);
    size_t columns = buffer_count(&all, 0) / (size_t)n, k = buffer_count(&all, 1) / (size_t)n;
    if (!buffer_has(&all, 0, columns * (size_t)n, "rows") ||
        !buffer_has(&all, 1, k * (size_t)n, "coefficients") ||
        !buffer_has(&all, 2, columns * k, "out") || !buffers_are_apart(&all, 0))
        return finish(&all, NULL);
    Py_BEGIN_ALLOW_THREADS
    set->mix(rows, (size_t)n, columns, coefficients, k, out);
    Py_END_ALLOW_THREADS
    return finish(&all, Py_None);
}

static PyObject *py_order(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    (void)module;
    buffers all = {.taken = 0};
    const kernels *set = active;
    const float *rows, *coefficients = NULL;
    const uint8_t *network;
    float *out;
    Py_ssize_t n, k, first = -1, keep = -1;
    int around;
    if (!has_arguments(count, 8) || (n = k = to_rows(given[1])) < 0 ||
        (around = PyObject_IsTrue(given[6])) < 0 ||
        ((first = PyLong_AsSsize_t(given[4])) == -1 && PyErr_Occurred()) ||
        ((keep = PyLong_AsSsize_t(given[5])) == -1 && PyErr_Occurred()) ||
        (rows = take_buffer(&all, given[0], "rows", "f", READ)) == NULL ||
        (network = take_buffer(&all, given[3], "network", "B", READ)) == NULL ||
        (out = take_buffer(&all, given[7], "out", "f", WRITE)) == NULL ||
        (given[2] != Py_None &&
         (coefficients = take_buffer(&all, given[2], "coefficients", "f", READ)) == NULL))
        return finish(&all, NULL);
    if (coefficients != NULL)
        k = (Py_ssize_t)(buffer_count(&all, 3) / (size_t)n);
    size_t columns = buffer_count(&all, 2), pairs = buffer_count(&all, 1) / 2;
    if (!buffer_has(&all, 0, columns * (size_t)n, "rows") ||
        !buffer_has(&all, 1, 2 * pairs, "network") ||
        (coefficients != NULL && !buffer_has(&all, 3, (size_t)(k * n), "coefficients")) ||
        !buffers_are_apart(&all, 0))
        return finish(&all, NULL);
    const char *wrong = NULL;
    for (size_t i = 0; i < 2 * pairs; i++)
        if (network[i] >= k)
            wrong = "the network names a row that is not there";
    if (k > ROWS_MAX || first < 0 || first > k || keep < 1 || keep > k - first ||
        (around && first != 0))
        wrong = "there are not so many rows to keep";
    if (wrong != NULL) {
        PyErr_SetString(PyExc_ValueError, wrong);
        return finish(&all, NULL);
    }
    Py_BEGIN_ALLOW_THREADS
    set->order(rows, (size_t)n, columns, coefficients, (size_t)k, network, pairs, (size_t)first,
               (size_t)keep, around, out);
    Py_END_ALLOW_THREADS
    return finish(&all, Py_None);
}

static PyObject *py_gram(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    (void)module;
    buffers all = {.taken = 0};
    const kernels *set = active;
    const float *rows;
    double *total;
    Py_ssize_t n;
    if (!has_arguments(count, 3) || (n = to_rows(given[1])) < 0 ||
        (rows = take_buffer(&all, given[0], "rows", "f", READ)) == NULL ||
        (total = take_buffer(&all, given[2], "total", "d", WRITE)) == NULL)
        return finish(&all, NULL);
    size_t columns = buffer_count(&all, 0) / (size_t)n;
    if (!buffer_has(&all, 0, columns * (size_t)n, "rows") ||
        !buffer_has(&all, 1, (size_t)(n * n), "total") || !buffers_are_apart(&all, 0))
        return finish(&all, NULL);
    Py_BEGIN_ALLOW_THREADS
    set->gram(rows, (size_t)n, columns, total);
    Py_END_ALLOW_THREADS
    return finish(&all, Py_None);
}

/* ---------------------------------------------------------------- audits */

static PyObject *py_sketch(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    (void)module;
    buffers all = {.taken = 0};
    const kernels *set = active;
    const float *values;
    const uint8_t *bits;
    double *out;
    if (!has_arguments(count, 3) ||
        (values = take_buffer(&all, given[0], "values", "f", READ)) == NULL ||
        (bits = take_buffer(&all, given[1], "bits", "B", READ)) == NULL ||
        (out = take_buffer(&all, given[2], "out", "d", WRITE)) == NULL ||
        !buffer_has(&all, 1, (buffer_count(&all, 0) + 7) / 8, "bits") ||
        !buffer_has(&all, 2, BUCKETS, "out") || !buffers_are_apart(&all, 0))
        return finish(&all, NULL);
    size_t elements = buffer_count(&all, 0);
    Py_BEGIN_ALLOW_THREADS
    set->sketch(values, elements, bits, out);
    Py_END_ALLOW_THREADS
    return finish(&all, Py_None);
}

static PyObject *py_squares(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    (void)module;
    buffers all = {.taken = 0};
    const kernels *set = active;
    const float *values, *other;
    double *out;
    if (!has_arguments(count, 3) ||
        (values = take_buffer(&all, given[0], "values", "f", READ)) == NULL ||
        (other = take_buffer(&all, given[1], "other", "f", READ)) == NULL ||
        (out = take_buffer(&all, given[2], "out", "d", WRITE)) == NULL ||
        !buffer_has(&all, 1, buffer_count(&all, 0), "other") ||
        !buffer_has(&all, 2, BUCKETS, "out") || !buffers_are_apart(&all, 0))
        return finish(&all, NULL);
    size_t elements = buffer_count(&all, 0);
    Py_BEGIN_ALLOW_THREADS
    set->squares(values, other, elements, out);
    Py_END_ALLOW_THREADS
    return finish(&all, Py_None);
}

static PyObject *py_peaks(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    (void)module;
    buffers all = {.taken = 0};
    const kernels *set = active;
    const float *values;
    float *out;
    size_t block;
    if (!has_arguments(count, 3) || !to_size(given[1], &block) ||
        (values = take_buffer(&all, given[0], "values", "f", READ)) == NULL ||
        (out = take_buffer(&all, given[2], "out", "f", WRITE)) == NULL)
        return finish(&all, NULL);
    size_t elements = buffer_count(&all, 0);
    if (block == 0) {
        PyErr_SetString(PyExc_ValueError, "blocks of no elements");
        return finish(&all, NULL);
    }
    if (!buffer_has(&all, 1, elements / block + (elements % block != 0), "out") ||
        !buffers_are_apart(&all, 0))
        return finish(&all, NULL);
    Py_BEGIN_ALLOW_THREADS
    set->peaks(values, elements, block, out);
    Py_END_ALLOW_THREADS
    return finish(&all, Py_None);
}

/* ---------------------------------------------------------------- the module */

#define FAST(NAME) {#NAME, (PyCFunction)(void (*)(void))py_##NAME, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    FAST(encode),
    FAST(check),
    FAST(decode),
    FAST(decode_columns),
    FAST(decode_add),
    FAST(weigh),
    FAST(outer_step),
    FAST(mix),
    FAST(order),
    FAST(gram),
    FAST(sketch),
    FAST(squares),
    FAST(peaks),
    {"levels", py_levels, METH_NOARGS, NULL},
    {"level", py_level, METH_NOARGS, NULL},
    {"use", py_use, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

/* Changed with every change of what a function takes, gives or computes, here and in native.py: so a
 * library from older sources is not used. */
enum { INTERFACE = 6 };

static int start(PyObject *module)
{
    find_levels();
    return PyModule_AddIntConstant(module, "INTERFACE", INTERFACE);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)start}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "atoll._kernels",
    .m_doc = "Kernels in C; collectives/native.py says what they take.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__kernels(void)
{
    return PyModuleDef_Init(&definition);
}
