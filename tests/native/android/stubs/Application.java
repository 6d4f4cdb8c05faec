package android.app;

import android.content.Context;
import android.content.ContextWrapper;

public class Application extends ContextWrapper {
    public Application() {
        super(null);
    }

    @Override
    public Context getApplicationContext() {
        return this;
    }

    public void onCreate() {}
}
