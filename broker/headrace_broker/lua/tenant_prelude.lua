local LONGEST_HEADERS, LONGEST_TENANT, LONGEST_PREFIX, LONGEST_ID = 256 * 1024, 800, 32, 2048
local HASHED_WHOLE = 1024 * 1024 -- bytes of a message

local function text_of(value, longest)
  return type(value) == 'string' and #value <= longest and not string.find(value, '%c') and value or nil
end

-- The headers of a message that begins with '"headers":', up to its end; nil where they cannot be read.
local function headers_in(message)
  local readable, envelope = pcall(cjson.decode, '{' .. message)
  return readable and type(envelope.headers) == 'table' and envelope.headers or nil
end

-- The request id in headers, where it can be one.
local function request_of(headers)
  local id = headers.id
  return type(id) == 'string' and #id > 0 and #id <= LONGEST_ID and id or nil
end

-- Who sent the message, '' where it does not say or says nonsense; the hash of its prompt's beginning, or nil; and its
-- request id, or nil. Only what begins with its headers is decoded: the pattern cannot match inside a string of the
-- message, where its quotes would be escaped.
local function tenant_of(body)
  local at = string.find(body, '"headers":', 1, true)
  if not at or #body - at > LONGEST_HEADERS then return '' end
  local headers = headers_in(string.sub(body, at))
  if not headers then return '' end
  return text_of(headers.tenant, LONGEST_TENANT) or '', text_of(headers.prefix, LONGEST_PREFIX), request_of(headers)
end

-- The SHA-1 of a message. That of a large one leaves its middle out, as it would take 50 ms, where its request id can be
-- read and is in what is left: a second message of this id is a duplicate whatever its middle says.
local function lease_id_of(body)
  if #body > HASHED_WHOLE and select(3, tenant_of(body)) then
    body = #body .. string.sub(body, 1, LONGEST_HEADERS) .. string.sub(body, -LONGEST_HEADERS)
  end
  return redis.sha1hex(body)
end
