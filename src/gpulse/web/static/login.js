// Login page: remember the address of a shared link, to open it after the login.

(() => {
  try {
    if (location.hash) {
      sessionStorage.setItem("gpulse.return", location.hash);
    }
  } catch {
    // Without storage, the login leads to the overview.
  }
})();
