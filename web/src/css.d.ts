/** Vite bundles the styles that a module imports. */
declare module '*.css'
