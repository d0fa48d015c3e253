/* Buffers of Python objects, checked before anything is read through them. */
#ifndef ATOLL_BUFFERS_H
#define ATOLL_BUFFERS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

enum { BUFFERS_MAX = 5, READ = 0, WRITE = 1 };

/* The buffers of one call: zero it, take them, and give all back in the end, whatever happened. */
typedef struct {
    Py_buffer views[BUFFERS_MAX];
    int writes[BUFFERS_MAX];
    int taken;
} buffers;

/* The elements of a flat, contiguous, aligned buffer whose format is one of `formats`: f float32,
 * d float64, B uint8. NULL with ValueError or TypeError for another. */
void *take_buffer(buffers *all, PyObject *object, const char *what, const char *formats, int use);

/* The elements and the format of what was taken as the `index`-th. */
size_t buffer_count(const buffers *all, int index);
char buffer_format(const buffers *all, int index);

/* 0 with ValueError unless the buffer has `count` elements. */
int buffer_has(const buffers *all, int index, size_t count, const char *what);

/* 0 with ValueError if one that is written shares memory with another. If `twins` is not 0, a buffer
 * and the one taken `twins` after it may be the very same. */
int buffers_are_apart(const buffers *all, int twins);

/* The last that was taken; all. */
void give_back_buffer(buffers *all);
void give_back_buffers(buffers *all);

#endif
