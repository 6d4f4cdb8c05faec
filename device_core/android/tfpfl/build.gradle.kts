plugins {
    id("com.android.library")
    id("org.jetbrains.kotlin.android")
}

android {
    namespace = "tfpfl.android"
    compileSdk = 36
    defaultConfig {
        minSdk = 23 // LiteRT's, and the first that knows an idle device
        consumerProguardFiles("keep.pro")
        ndk { abiFilters += listOf("arm64-v8a", "x86_64") }
    }
    externalNativeBuild { cmake { path = file("CMakeLists.txt") } }
    sourceSets.getByName("main").kotlin.srcDir("../../kotlin") // tfpfl/Client.kt, as it is
    compileOptions {
        sourceCompatibility = JavaVersion.VERSION_17
        targetCompatibility = JavaVersion.VERSION_17
    }
}

kotlin { jvmToolchain(17) }

dependencies {
    implementation("com.google.ai.edge.litert:litert:2.3.0") // brings libLiteRt.so, which the core loads
    api("androidx.work:work-runtime:2.10.0")
}
