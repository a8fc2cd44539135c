//! The end of a process whose mapped file was cut under it.
//!
//! Files are checked before every pass; one that is cut during a pass makes the next
//! read of a lost page a SIGBUS. Nothing can be computed then, but it can be said. What
//! one would get wrong: a signal handler may write and end the process, nothing more.

/// From now on a SIGBUS is an error with a message and exit code 1.
#[cfg(unix)]
pub fn explain_bus_errors() {
    extern "C" fn tell(_signal: libc::c_int) {
        const MESSAGE: &[u8] = b"error: a model file was cut, or can no longer be read, while its \
            weights were in use\n";
        // SAFETY: `write` may be called from signal handlers and reads a constant.
        unsafe { libc::write(libc::STDERR_FILENO, MESSAGE.as_ptr().cast(), MESSAGE.len()) };
        // SAFETY: `_exit` may be called from signal handlers.
        unsafe { libc::_exit(1) }
    }
    let handler: extern "C" fn(libc::c_int) = tell;
    // SAFETY: the handler has the signature of one and calls only what handlers may.
    unsafe { libc::signal(libc::SIGBUS, handler as libc::sighandler_t) };
}

#[cfg(not(unix))]
pub fn explain_bus_errors() {}
