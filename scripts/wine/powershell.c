/* Stands in for PowerShell, which does not run in Wine: cmd.exe runs the command that crow gives it, without the lines
   that crow puts around it (system/windows.py). Single quotes become double ones, and `&` before a program goes. */
#include <wchar.h>
#include <windows.h>

int wmain(int argc, wchar_t **argv) {
    static wchar_t text[32768], line[32768];
    STARTUPINFOW start = {sizeof start};
    PROCESS_INFORMATION process;
    DWORD code = 1;
    wchar_t *begin = text, *at;
    int i = 1;
    while (i < argc && _wcsicmp(argv[i], L"-Command"))
        i++;
    if (++i >= argc)
        return 64;
    for (; i < argc; i++) {
        wcscat(text, argv[i]);
        wcscat(text, L" ");
    }
    if (!wcsncmp(begin, L"try {", 5) && (at = wcschr(begin, L'\n')))
        begin = at + 1;
    if ((at = wcsstr(begin, L"\nif ($?)")))
        *at = 0;
    if (!wcsncmp(begin, L"& '", 3))
        for (at = begin += 2; *at; at++)
            if (*at == L'\'')
                *at = L'"';
    for (at = begin; *at; at++)
        if (*at == L'\n')
            *at = L'&';
    wcscpy(line, L"cmd.exe /d /s /c \"");
    wcscat(line, begin);
    wcscat(line, L"\"");
    if (!CreateProcessW(NULL, line, NULL, NULL, TRUE, 0, NULL, NULL, &start, &process))
        return 65;
    WaitForSingleObject(process.hProcess, INFINITE);
    GetExitCodeProcess(process.hProcess, &code);
    return code;
}
