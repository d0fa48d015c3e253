/* Buffers of Python objects, checked before anything is read through them. */
#include "buffers.h"

#include <stdint.h>
#include <string.h>

/* The code of a format string: byte order marks that mean this machine's are left out. */
static char code_of(const char *format)
{
    if (format == NULL)
        return 'B'; /* so says the buffer protocol */
    if (*format == '@' || *format == '=' || *format == '<')
        format++;
    return format[0] != '\0' && format[1] == '\0' ? format[0] : '\0';
}

static size_t size_of(char code)
{
    switch (code) {
    case 'f': return sizeof(float);
    case 'd': return sizeof(double);
    case 'B': return sizeof(uint8_t);
    default: return 0;
    }
}

void *take_buffer(buffers *all, PyObject *object, const char *what, const char *formats, int use)
{
    Py_buffer *view = &all->views[all->taken];
    if (all->taken == BUFFERS_MAX) {
        PyErr_SetString(PyExc_SystemError, "too many buffers");
        return NULL;
    }
    if (PyObject_GetBuffer(object, view, PyBUF_STRIDES | PyBUF_FORMAT) < 0)
        return NULL;
    all->writes[all->taken++] = use;
    char code = code_of(view->format);
    size_t size = size_of(code);
    const char *wrong = NULL;
    if (code == '\0' || strchr(formats, code) == NULL || (size_t)view->itemsize != size)
        wrong = "has elements of another type";
    else if (view->ndim != 1)
        wrong = "is not flat";
    else if (!PyBuffer_IsContiguous(view, 'C'))
        wrong = "is not contiguous";
    else if ((uintptr_t)view->buf % size != 0)
        wrong = "is not aligned";
    else if (use == WRITE && view->readonly)
        wrong = "is read-only";
    if (wrong != NULL) {
        PyErr_Format(PyExc_ValueError, "%s %s", what, wrong);
        return NULL;
    }
    static double nothing; /* an empty buffer may have no address, and NULL means refused */
    return view->buf != NULL ? view->buf : &nothing;
}

size_t buffer_count(const buffers *all, int index)
{
    return (size_t)(all->views[index].len / all->views[index].itemsize);
}

char buffer_format(const buffers *all, int index)
{
    return code_of(all->views[index].format);
}

int buffer_has(const buffers *all, int index, size_t count, const char *what)
{
    if (buffer_count(all, index) == count)
        return 1;
    PyErr_Format(PyExc_ValueError, "%s has %zu elements, not %zu", what, buffer_count(all, index),
                 count);
    return 0;
}

int buffers_are_apart(const buffers *all, int twins)
{
    for (int i = 0; i < all->taken; i++)
        for (int j = i + 1; j < all->taken; j++) {
            const Py_buffer *a = &all->views[i], *b = &all->views[j];
            uintptr_t a_start = (uintptr_t)a->buf, b_start = (uintptr_t)b->buf;
            int overlap = a_start < b_start + (size_t)b->len && b_start < a_start + (size_t)a->len;
            int same = a_start == b_start && a->len == b->len;
            if (!overlap || (same && j - i == twins) || !(all->writes[i] || all->writes[j]))
                continue;
            PyErr_SetString(PyExc_ValueError, "what is written shares memory with another buffer");
            return 0;
        }
    return 1;
}

void give_back_buffer(buffers *all)
{
    PyBuffer_Release(&all->views[--all->taken]);
}

void give_back_buffers(buffers *all)
{
    while (all->taken > 0)
        give_back_buffer(all);
}
