//! The CUDA driver behind owned handles: context, memory, stream, kernels, graphs.
//!
//! What a reader would get wrong: the library is loaded when it is first called
//! and a call without it panics, so [`Context::open`] asks for it by name first
//! and nothing here can be made without a context.

use crate::Error;
use cudarc::driver::sys;
use model::DeviceError;
use std::ffi::{CStr, CString, c_void};
use std::marker::PhantomData;
use std::ptr::null_mut;
use std::sync::Arc;

/// Smallest CUDA version of a driver: launches with attributes.
const OLDEST_DRIVER: (i32, &str) = (12_000, "12.0");

/// Calls a function of the driver; an error names it.
macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: the driver is loaded, as `Context::open` has checked; handles are alive as long as their owners; pointers
        // lead to values that outlive the call, or to memory whose bounds the function at hand has checked.
        let answer = unsafe { sys::$function($($argument),*) };
        check(stringify!($function), answer)
    }};
}

fn check(call: &'static str, answer: sys::CUresult) -> Result<(), Error> {
    match answer {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        other => Err(Error::Driver {
            call,
            answer: format!("{other:?}"),
        }),
    }
}

/// A device and its context.
pub(crate) struct Context {
    device: sys::CUdevice,
    handle: sys::CUcontext,
    pub(crate) name: String,
    /// Compute capability.
    pub(crate) capability: (u32, u32),
    pub(crate) n_multiprocessors: u32,
    /// Bytes of shared memory that a block can have.
    pub(crate) shared_bytes: u32,
    /// Bytes of shared memory of a multiprocessor.
    pub(crate) multiprocessor_shared_bytes: u32,
    /// CUDA version of the driver, as 1000 * major + 10 * minor.
    pub(crate) driver_version: i32,
}

// SAFETY: the driver's functions may be called from any thread; `bind` makes the context that thread's.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Opens device `ordinal`, counted as the driver shows them.
    pub(crate) fn open(ordinal: usize) -> Result<Arc<Context>, Error> {
        find_driver()?;
        let mut driver_version = 0;
        call!(cuDriverGetVersion(&mut driver_version))?;
        if driver_version < OLDEST_DRIVER.0 {
            return Err(Error::DriverTooOld {
                found: version_text(driver_version),
                needed: OLDEST_DRIVER.1,
            });
        }
        let mut count = 0;
        match call!(cuInit(0)) {
            Ok(()) => call!(cuDeviceGetCount(&mut count))?,
            Err(Error::Driver { answer, .. }) if answer.contains("NO_DEVICE") => {}
            Err(error) => return Err(error),
        }
        if ordinal >= count as usize {
            let count = count as usize;
            return Err(Error::DeviceMissing { ordinal, count });
        }
        let mut device = 0;
        call!(cuDeviceGet(&mut device, ordinal as i32))?;
        let mut name = [0 as std::ffi::c_char; 128];
        call!(cuDeviceGetName(
            name.as_mut_ptr(),
            name.len() as i32,
            device
        ))?;
        let bytes = name.map(|c| c as u8);
        let name = CStr::from_bytes_until_nul(&bytes).unwrap_or_default();
        let name = name.to_string_lossy().into_owned();
        use sys::CUdevice_attribute_enum as Attribute;
        let capability = (
            attribute(
                device,
                Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            )?,
            attribute(
                device,
                Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )?,
        );
        if capability.0 < 8 {
            return Err(Error::CapabilityTooLow {
                device: name,
                found: capability,
            });
        }
        let mut handle = null_mut();
        call!(cuDevicePrimaryCtxRetain(&mut handle, device))?;
        let context = Context {
            device,
            handle,
            name,
            capability,
            n_multiprocessors: attribute(
                device,
                Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
            )?,
            shared_bytes: attribute(
                device,
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )?,
            multiprocessor_shared_bytes: attribute(
                device,
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
            )?,
            driver_version,
        };
        context.bind()?;
        Ok(Arc::new(context))
    }

    /// Makes the context that of the calling thread.
    pub(crate) fn bind(&self) -> Result<(), Error> {
        call!(cuCtxSetCurrent(self.handle))
    }

    /// The architecture that kernels are compiled for, such as 90.
    pub(crate) fn architecture(&self) -> u32 {
        self.capability.0 * 10 + self.capability.1
    }

    /// Free and total bytes of the device's memory.
    pub(crate) fn memory_bytes(&self) -> Result<(u64, u64), Error> {
        let (mut free, mut total) = (0, 0);
        call!(cuMemGetInfo_v2(&mut free, &mut total))?;
        Ok((free as u64, total as u64))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // Nothing is left to be told of a failure.
        call!(cuDevicePrimaryCtxRelease_v2(self.device)).ok();
    }
}

fn attribute(device: sys::CUdevice, what: sys::CUdevice_attribute) -> Result<u32, Error> {
    let mut value = 0;
    call!(cuDeviceGetAttribute(&mut value, what, device))?;
    Ok(value as u32)
}

/// `12.4` of 12040.
pub(crate) fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// Is the driver's library there?
fn find_driver() -> Result<(), Error> {
    // SAFETY: loading the driver runs its initializers, which is what it is for.
    if unsafe { sys::is_culib_present() } {
        return Ok(());
    }
    Err(Error::LibraryMissing {
        library: "the NVIDIA driver's library",
        tried: "libcuda.so, libcuda.so.1".to_string(),
        remedy: "install the driver of the GPU, or use --device cpu",
    })
}

/// Device memory.
pub(crate) struct Memory {
    address: u64,
    bytes: usize,
    context: Arc<Context>,
}

impl Memory {
    /// Memory of any content.
    pub(crate) fn new(
        context: &Arc<Context>,
        what: &'static str,
        bytes: usize,
    ) -> Result<Memory, DeviceError> {
        let mut address = 0;
        let allocated = call!(cuMemAlloc_v2(&mut address, bytes.max(1)));
        match allocated {
            Ok(()) => Ok(Memory {
                address,
                bytes,
                context: context.clone(),
            }),
            Err(Error::Driver { answer, .. }) if answer.contains("OUT_OF_MEMORY") => {
                Err(DeviceError::OutOfMemory {
                    what,
                    wanted_bytes: bytes as u64,
                })
            }
            Err(error) => Err(error.into()),
        }
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let freed = self
            .context
            .bind()
            .and_then(|()| call!(cuMemFree_v2(self.address)));
        // Nothing is left to be told of a failure; the driver repeats it at the next call.
        freed.ok();
    }
}

/// Host memory that the device can reach without a copy of the driver's.
pub(crate) struct Pinned {
    start: *mut u8,
    bytes: usize,
    context: Arc<Context>,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Pinned {}

impl Pinned {
    pub(crate) fn new(context: &Arc<Context>, bytes: usize) -> Result<Pinned, Error> {
        let mut start: *mut c_void = null_mut();
        call!(cuMemHostAlloc(&mut start, bytes.max(1), 0))?;
        let start = start.cast::<u8>();
        // SAFETY: just allocated, so large; and initialized before anyone reads it.
        unsafe { start.write_bytes(0, bytes) }
        Ok(Pinned {
            start,
            bytes,
            context: context.clone(),
        })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The bytes. The stream must have passed the last copy from or to them.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: allocated and initialized in `new`; borrowed mutably with `self`.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let freed = self
            .context
            .bind()
            .and_then(|()| call!(cuMemFreeHost(self.start.cast())));
        // As for device memory.
        freed.ok();
    }
}

/// Compiled kernels.
pub(crate) struct Module {
    handle: sys::CUmodule,
    context: Arc<Context>,
}

// SAFETY: as for the context.
unsafe impl Send for Module {}

/// A kernel; alive as long as its module.
#[derive(Clone, Copy)]
pub(crate) struct Function {
    handle: sys::CUfunction,
}

// SAFETY: as for the context.
unsafe impl Send for Function {}

impl Module {
    /// Loads a cubin.
    pub(crate) fn load(context: &Arc<Context>, cubin: &[u8]) -> Result<Module, Error> {
        let mut handle = null_mut();
        call!(cuModuleLoadData(&mut handle, cubin.as_ptr().cast()))?;
        Ok(Module {
            handle,
            context: context.clone(),
        })
    }

    /// The kernel `name`, which may use all of a block's shared memory.
    pub(crate) fn function(&self, name: &str) -> Result<Function, Error> {
        let c_name = CString::new(name).expect("a kernel's name");
        let mut handle = null_mut();
        call!(cuModuleGetFunction(
            &mut handle,
            self.handle,
            c_name.as_ptr()
        ))?;
        use sys::CUfunction_attribute_enum as Attribute;
        let mut fixed = 0;
        call!(cuFuncGetAttribute(
            &mut fixed,
            Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
            handle
        ))?;
        let most = self.context.shared_bytes as i32 - fixed;
        let dynamic = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        call!(cuFuncSetAttribute(handle, dynamic, most))?;
        Ok(Function { handle })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let unloaded = self
            .context
            .bind()
            .and_then(|()| call!(cuModuleUnload(self.handle)));
        // As for device memory.
        unloaded.ok();
    }
}

impl Function {
    /// Blocks of `threads` threads with `shared` bytes that a multiprocessor holds.
    pub(crate) fn resident(self, threads: u32, shared: u32) -> Result<u32, Error> {
        let mut blocks = 0;
        call!(cuOccupancyMaxActiveBlocksPerMultiprocessor(
            &mut blocks,
            self.handle,
            threads as i32,
            shared as usize,
        ))?;
        Ok(blocks.max(1) as u32)
    }
}

/// Size of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    pub(crate) blocks: [u32; 3],
    pub(crate) threads: u32,
    /// Bytes of dynamic shared memory.
    pub(crate) shared: u32,
}

/// An argument of a launch: it is read before the launch returns.
#[repr(transparent)]
pub(crate) struct Argument<'a> {
    value: *mut c_void,
    borrow: PhantomData<&'a ()>,
}

impl<'a> Argument<'a> {
    /// `T` is laid out as the kernel's own type.
    pub(crate) fn new<T: Copy>(value: &'a T) -> Argument<'a> {
        Argument {
            value: std::ptr::from_ref(value).cast_mut().cast(),
            borrow: PhantomData,
        }
    }
}

/// The queue of the device's work.
pub(crate) struct Stream {
    handle: sys::CUstream,
    context: Arc<Context>,
}

// SAFETY: as for the context.
unsafe impl Send for Stream {}

impl Stream {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Stream, Error> {
        let mut handle = null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        call!(cuStreamCreate(&mut handle, flags))?;
        Ok(Stream {
            handle,
            context: context.clone(),
        })
    }

    /// Waits for all work so far.
    pub(crate) fn finish(&self) -> Result<(), Error> {
        call!(cuStreamSynchronize(self.handle))
    }

    /// Copies the first `bytes` of `from` to the device, later: `from` must stay as it is until then.
    pub(crate) fn upload(&self, to: u64, from: &Pinned, bytes: usize) -> Result<(), Error> {
        assert!(bytes <= from.bytes, "{bytes} of {} bytes", from.bytes);
        call!(cuMemcpyHtoDAsync_v2(
            to,
            from.start.cast(),
            bytes,
            self.handle
        ))
    }

    /// Copies `bytes` bytes at `from` of the device to the host, and waits for it.
    pub(crate) fn download(&self, from: u64, bytes: usize) -> Result<Vec<u8>, Error> {
        let mut to = vec![0u8; bytes];
        call!(cuMemcpyDtoHAsync_v2(
            to.as_mut_ptr().cast(),
            from,
            bytes,
            self.handle
        ))?;
        self.finish()?;
        Ok(to)
    }

    /// Copies `bytes` bytes at `from` of the device to the front of `to`, and waits for it.
    pub(crate) fn fetch(&self, to: &mut Pinned, from: u64, bytes: usize) -> Result<(), Error> {
        assert!(bytes <= to.bytes, "{bytes} of {} bytes", to.bytes);
        call!(cuMemcpyDtoHAsync_v2(
            to.start.cast(),
            from,
            bytes,
            self.handle
        ))?;
        self.finish()
    }

    /// Copies inside the device.
    pub(crate) fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), Error> {
        call!(cuMemcpyDtoDAsync_v2(to, from, bytes, self.handle))
    }

    /// Makes `bytes` bytes zero.
    pub(crate) fn clear(&self, at: u64, bytes: usize) -> Result<(), Error> {
        call!(cuMemsetD8Async(at, 0, bytes, self.handle))
    }

    /// Starts a kernel. `is_programmatic`: it may begin before the launch before it is done; the kernel waits itself.
    pub(crate) fn launch(
        &self,
        function: Function,
        grid: Grid,
        is_programmatic: bool,
        arguments: &mut [Argument<'_>],
    ) -> Result<(), Error> {
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue {
                programmaticStreamSerializationAllowed: 1,
            },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: grid.blocks[0],
            gridDimY: grid.blocks[1],
            gridDimZ: grid.blocks[2],
            blockDimX: grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared,
            hStream: self.handle,
            attrs: &mut attribute,
            numAttrs: u32::from(is_programmatic),
        };
        let arguments = arguments.as_mut_ptr().cast::<*mut c_void>();
        call!(cuLaunchKernelEx(
            &config,
            function.handle,
            arguments,
            null_mut()
        ))
    }

    /// From now on launches are recorded, not executed.
    pub(crate) fn begin_capture(&self) -> Result<(), Error> {
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        call!(cuStreamBeginCapture_v2(self.handle, mode))
    }

    /// What was recorded.
    pub(crate) fn end_capture(&self) -> Result<Graph, Error> {
        let mut recorded = null_mut();
        call!(cuStreamEndCapture(self.handle, &mut recorded))?;
        let mut handle = null_mut();
        let made = call!(cuGraphInstantiateWithFlags(&mut handle, recorded, 0));
        call!(cuGraphDestroy(recorded))?;
        made?;
        Ok(Graph {
            handle,
            context: self.context.clone(),
        })
    }

    /// Executes what was recorded.
    pub(crate) fn replay(&self, graph: &Graph) -> Result<(), Error> {
        call!(cuGraphLaunch(graph.handle, self.handle))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let gone = self
            .context
            .bind()
            .and_then(|()| call!(cuStreamDestroy_v2(self.handle)));
        // As for device memory.
        gone.ok();
    }
}

/// Recorded launches.
pub(crate) struct Graph {
    handle: sys::CUgraphExec,
    context: Arc<Context>,
}

// SAFETY: as for the context.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        let gone = self
            .context
            .bind()
            .and_then(|()| call!(cuGraphExecDestroy(self.handle)));
        // As for device memory.
        gone.ok();
    }
}
