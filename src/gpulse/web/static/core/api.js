// Requests to the head's HTTP API.

/** An error answer of the head, or a failed request. */
export class ApiError extends Error {
  /**
   * @param {string} message
   * @param {string | null} [hint]
   */
  constructor(message, status = 0, hint = null) {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.hint = hint;
  }
}

/**
 * Build a URL: lists are joined by commas, unknown values are left out.
 * @param {string} path
 * @param {Dashboard.Words} [params]
 */
export function url(path, params = {}) {
  const words = Object.entries(params)
    .filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([word, value]) => [word, Array.isArray(value) ? value.join(",") : String(value)])
    .filter(([, value]) => value !== "");
  return words.length ? `${path}?${new URLSearchParams(words)}` : path;
}

/**
 * Send a GET request. Throws an ApiError, or an AbortError when the signal is aborted.
 * @template {string} P
 * @param {P} path
 * @param {Dashboard.Words} [params]
 * @param {{ signal?: AbortSignal }} [options]
 * @returns {Promise<P extends keyof Api.Answers ? Api.Answers[P] : unknown>}
 */
export async function get(path, params = {}, { signal } = {}) {
  return ask(url(path, params), { signal });
}

/**
 * Send a POST request.
 * @param {string} path
 * @param {object} [body]
 * @param {{ signal?: AbortSignal }} [options]
 * @returns {Promise<{ message: string, session?: Api.SessionAnswer }>}
 */
export async function post(path, body = {}, { signal } = {}) {
  return ask(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
}

/** Show the login page, which leads back to the current page. */
export function login() {
  try {
    sessionStorage.setItem("gpulse.return", location.hash);
  } catch {
    // Without storage, the login leads to the overview.
  }
  location.assign("/login");
}

/** Return, once, the page from which the login was opened. */
export function returnTo() {
  try {
    const hash = sessionStorage.getItem("gpulse.return");
    sessionStorage.removeItem("gpulse.return");
    return hash;
  } catch {
    return null;
  }
}

/**
 * @param {string} address
 * @param {RequestInit} options
 */
async function ask(address, options) {
  const answer = await reached(address, { headers: { Accept: "application/json" }, ...options });
  if (answer.status === 401) {
    login();
    throw new ApiError("a login is required", 401, "log in with the head's token");
  }
  const document = await answer.json().catch((error) => {
    if (isAbort(error)) {
      throw error;
    }
    return null;
  });
  if (!answer.ok) {
    throw new ApiError(document?.error ?? `the head returned status ${answer.status}`, answer.status, document?.hint ?? null);
  }
  if (document === null) {
    throw new ApiError("the head's answer is not valid JSON", answer.status, "reload the page");
  }
  return document;
}

/**
 * @param {string} address
 * @param {RequestInit} options
 */
async function reached(address, options) {
  try {
    return await fetch(address, { credentials: "same-origin", cache: "no-store", ...options });
  } catch (error) {
    if (isAbort(error)) {
      throw error;
    }
    throw new ApiError("the head cannot be reached", 0, "check that gpulse head is running");
  }
}

/**
 * True for the error of an aborted request.
 * @param {unknown} error
 */
export function isAbort(error) {
  return error instanceof Error && error.name === "AbortError";
}

/**
 * Return a thrown value as an Error.
 * @param {unknown} thrown
 * @returns {Error}
 */
export function asError(thrown) {
  return thrown instanceof Error ? thrown : new Error(String(thrown));
}
