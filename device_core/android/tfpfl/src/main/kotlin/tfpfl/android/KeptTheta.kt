package tfpfl.android

import java.io.File
import java.io.IOException
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.security.MessageDigest
import tfpfl.Client

/**
 * Gives a client the theta with which its head was fitted, if `file` has it: float32, little-endian. A client begins
 * with its bundle's theta, with which a head of a later round is stale. If the file is missing or damaged, or is of
 * another head (such as after an update of the bundle), the client stays as it is.
 */
fun Client.receiveKept(file: File): Client {
    val content = contentOf(file) ?: return this
    val ofTheHead = MessageDigest.getInstance("SHA-256").digest(content).contentEquals(head.thetaSha256)
    if (ofTheHead && content.size == Float.SIZE_BYTES * numWeights) {
        val numbers = ByteBuffer.wrap(content).order(ByteOrder.LITTLE_ENDIAN).asFloatBuffer()
        receive(FloatArray(numWeights).also { numbers.get(it) })
    }
    return this
}

/** Writes what [receiveKept] reads; the file is the old one or the new one. */
internal fun keepTheta(file: File, theta: FloatArray) {
    val content = ByteBuffer.allocate(Float.SIZE_BYTES * theta.size).order(ByteOrder.LITTLE_ENDIAN)
    content.asFloatBuffer().put(theta)
    writeWhole(file, content.array())
}

/** What [putBack] takes; null: there is no file, or it cannot be read. */
internal fun contentOf(file: File): ByteArray? =
    try {
        file.readBytes()
    } catch (error: IOException) {
        null
    }

/** Makes the file what it was before [keepTheta]: the head that stays was fitted with that theta. */
internal fun putBack(file: File, content: ByteArray?) =
    if (content == null) Pending.delete(file) else writeWhole(file, content)
