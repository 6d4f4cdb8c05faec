package android.system;

import java.io.FileDescriptor;
import java.io.IOException;
import java.nio.channels.FileChannel;
import java.nio.file.Paths;
import java.nio.file.StandardOpenOption;
import java.util.HashMap;
import java.util.Map;

/** Opens folders alone, and counts how often they are written to the disk, which may be broken. */
public final class Os {
    private static final int EIO = 5;
    private static final Map<FileDescriptor, FileChannel> OPEN = new HashMap<>();
    public static int synced = 0;
    public static boolean broken = false;

    public static FileDescriptor open(String path, int flags, int mode) throws ErrnoException {
        try {
            FileDescriptor opened = new FileDescriptor();
            OPEN.put(opened, FileChannel.open(Paths.get(path), StandardOpenOption.READ));
            return opened;
        } catch (IOException error) {
            throw new ErrnoException("open", EIO);
        }
    }

    public static void fsync(FileDescriptor fd) throws ErrnoException {
        if (broken) {
            throw new ErrnoException("fsync", EIO);
        }
        try {
            OPEN.get(fd).force(true);
            synced++;
        } catch (IOException error) {
            throw new ErrnoException("fsync", EIO);
        }
    }

    public static void close(FileDescriptor fd) throws ErrnoException {
        try {
            OPEN.remove(fd).close();
        } catch (IOException error) {
            throw new ErrnoException("close", EIO);
        }
    }

    public static int open() {
        return OPEN.size();
    }
}
