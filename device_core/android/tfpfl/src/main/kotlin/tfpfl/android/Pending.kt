package tfpfl.android

import android.system.ErrnoException
import android.system.Os
import android.system.OsConstants
import java.io.ByteArrayOutputStream
import java.io.DataInputStream
import java.io.DataOutputStream
import java.io.File
import java.io.FileOutputStream
import java.io.IOException
import java.util.zip.CRC32
import tfpfl.Head
import tfpfl.Update

/** A file of the worker cannot be written, read or deleted. It is no [IOException]: those are the server's. */
internal class PendingException(message: String, cause: Exception? = null) : Exception(message, cause)

/**
 * An update on its way: it is in a file until the server has answered, so that the same bytes can be sent again. With
 * the theta of its round the head was fitted.
 */
internal class Pending(val round: String, val update: Update, val theta: FloatArray) {
    /** The file is the old one or the new one, never half of one. */
    fun save(file: File) {
        val content = ByteArrayOutputStream()
        DataOutputStream(content).run {
            val head = update.head
            bytes(round.encodeToByteArray())
            bytes(update.payload)
            writeInt(update.numExamples)
            writeFloat(update.loss)
            floats(head.kernel)
            floats(head.bias)
            bytes(head.thetaSha256)
            writeBoolean(head.names != null)
            head.names?.let { bytes(it) }
            floats(theta)
            writeLong(crc(content.toByteArray()))
        }
        writeWhole(file, content.toByteArray())
    }

    companion object {
        /** The update in the file. Null: there is none, or the file is damaged, and is deleted then. */
        fun load(file: File): Pending? {
            if (!file.exists()) return null
            val content = try {
                file.readBytes()
            } catch (error: IOException) {
                throw PendingException("$file cannot be read: ${error.message}", error)
            }
            val input = DataInputStream(content.inputStream())
            val whole = content.size - Long.SIZE_BYTES
            if (whole < 0 || crc(content.copyOf(whole)) != content.copyOfRange(whole, content.size).long()) {
                delete(file)
                return null
            }
            return input.run {
                val round = bytes().decodeToString()
                val payload = bytes()
                val numExamples = readInt()
                val loss = readFloat()
                val head = Head(floats(), floats(), bytes(), if (readBoolean()) bytes() else null)
                Pending(round, Update(payload, numExamples, loss, head), floats())
            }
        }

        /** After a power cut it does not come back: the server would get the update again, and an old head be current. */
        fun delete(file: File) {
            if (!file.delete() && file.exists()) throw PendingException("$file cannot be deleted")
            sync(file)
        }

        private fun crc(content: ByteArray): Long = CRC32().run {
            update(content)
            value
        }

        private fun ByteArray.long(): Long = DataInputStream(inputStream()).readLong()

        private fun DataOutputStream.bytes(values: ByteArray) {
            writeInt(values.size)
            write(values)
        }

        private fun DataOutputStream.floats(values: FloatArray) {
            writeInt(values.size)
            values.forEach { writeFloat(it) }
        }

        private fun DataInputStream.bytes() = ByteArray(readInt()).also { readFully(it) }

        private fun DataInputStream.floats() = FloatArray(readInt()).also { for (i in it.indices) it[i] = readFloat() }
    }
}

/** Puts a file in the place of the old one, in one step. */
internal fun writeWhole(file: File, content: ByteArray) {
    val new = File("$file.new")
    try {
        FileOutputStream(new).use { stream ->
            stream.write(content)
            stream.fd.sync()
        }
    } catch (error: IOException) {
        new.delete() // half of a file, on a disk that may be full
        throw PendingException("$file cannot be written: ${error.message}", error)
    }
    if (!new.renameTo(file)) throw PendingException("$file cannot be written")
    sync(file)
}

/** The name of a file, or that it is gone, is on disk when its folder is. */
private fun sync(file: File) {
    val folder = file.absoluteFile.parent
    try {
        val opened = Os.open(folder, OsConstants.O_RDONLY, 0)
        try {
            Os.fsync(opened)
        } finally {
            Os.close(opened)
        }
    } catch (error: ErrnoException) {
        throw PendingException("$folder cannot be written to the disk: ${error.message}", error)
    }
}
