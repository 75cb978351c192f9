-- The usage ledger. Requires lease_prelude and budget_prelude.
--
-- A hash for each hour (UTC, by Redis's clock) has a row for each tenant, API key, queue, kind of request and priority
-- step. So it grows with their number, not with the number of requests. The row of a message is written by the script
-- that ends its lease. A message that is delivered again has not been counted before.
-- A field is an array in msgpack: tenant, key name, queue, kind, step. Its value is one, too: requests, prompt tokens,
-- cached tokens, output tokens, leases, milliseconds under the last lease.
--
-- A key of the wrong type must not prevent the acknowledgement. `pcall` costs less than a check of the type.

local count_usage
do -- a script may have 200 local variables outside of blocks
  local HOUR, DAY = 3600, 86400
  local MOST_ROWS = 1000 -- of one hour; further tenants and keys share a row
  local OTHERS = '(others)'

  local function step_of(list)
    local at = string.find(list, PRIORITY_SEPARATOR, 1, true)
    return at and tonumber(string.sub(list, at + #PRIORITY_SEPARATOR)) or 0
  end

  -- Returns the sums with the value of a row added, which may have been edited by hand.
  local function plus(counts, packed)
    local readable, before = pcall(cmsgpack.unpack, packed)
    if not readable or type(before) ~= 'table' then return counts end
    for i, count in ipairs(counts) do
      if is_finite(before[i]) then counts[i] = count + before[i] end
    end
    return counts
  end

  -- Returns whether the row is the first one of these names in this hour.
  local function add(start, kept, names, counts)
    local bucket, row = usage_key(start), cmsgpack.pack(names)
    local before = redis.pcall('HGET', bucket, row)
    if type(before) == 'table' then return true end
    local is_new, size = not before, before and 0 or redis.call('HLEN', bucket)
    if size >= MOST_ROWS then
      row = cmsgpack.pack({OTHERS, OTHERS, names[3], names[4], names[5]})
      before = redis.call('HGET', bucket, row)
    end
    if before then counts = plus(counts, before) end
    redis.call('HSET', bucket, row, cmsgpack.pack(counts))
    if is_new and size == 0 then redis.call('EXPIRE', bucket, kept) end
    return is_new
  end

  -- Records that the request is the tenant's, for as long as anything of it is stored. The first one of an hour
  -- removes those of which nothing is stored, and lets the key live until an hour after it.
  local function remember(tenant, request, at, kept, is_first)
    local requests = tenant_requests_key(tenant)
    local added = redis.pcall('ZADD', requests, at + kept, request)
    if is_first and type(added) == 'number' then
      redis.call('ZREMRANGEBYSCORE', requests, '-inf', at)
      redis.call('EXPIRE', requests, kept + HOUR)
    end
  end

  -- Adds what a message has used to the ledger, and to the budget of its API key.
  -- `record`: its record, or nil. `entry`: see `usage/entry.py`; '' if the message is not counted.
  function count_usage(id, record, entry)
    if entry == '' then return end
    local readable, given = pcall(cmsgpack.unpack, entry)
    if not readable then return end
    local days, kept, kind, key_name = given[1], given[2], given[3], given[4]
    local tenant, request = record and record.tenant or '', record and record.request
    local at = now()
    local second = math.floor(at)
    if key_name ~= '' and request then spend(key_name, request, given[5] + given[7], second) end
    local is_first = true
    if days > 0 then
      local held = record and record.taken and math.max(0, math.floor(at * 1000 - record.taken / 1000)) or 0
      local leases = record and record.grant or 1
      local names = {tenant, key_name, QUEUE, kind, record and step_of(record.list) or 0}
      local counts = {1, given[5], given[6], given[7], leases, held}
      is_first = add(second - second % HOUR, HOUR + days * DAY, names, counts)
    end
    if tenant ~= '' and request and kept > 0 then remember(tenant, request, second, kept, is_first) end
  end
end
