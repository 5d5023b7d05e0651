"""Is a custom operator what compilers take it for?"""
